//! Guests that write to their memory faster than it is sent, and limits that are changed meanwhile.

use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;

use crate::forward::{continue_destination, release_source};
use crate::rom;
use crate::world::{Side, World, code};

/// What the transfer is capped at: each pass takes a quarter of a second.
const CAP: u64 = 60_000_000;

fn policy() -> v1::TransferPolicy {
    v1::TransferPolicy { max_bandwidth: CAP, ..v1::TransferPolicy::default() }
}

fn limits(max_bandwidth: u64, downtime_limit_ms: u64) -> v1::TransferLimits {
    v1::TransferLimits { max_bandwidth, downtime_limit_ms, throttle: false }
}

fn set(limits: v1::TransferLimits) -> Action {
    Action::SetLimits(v1::SetLimits { limits: Some(limits) })
}

fn transfer(seen: &v1::VmObservation) -> v1::TransferStatus {
    seen.transfer.clone().unwrap_or_default()
}

/// A guest that writes to 16 MiB of its memory twice as fast as it may be sent.
async fn sending(policy: v1::TransferPolicy) -> World {
    let mut world = World::new().await.with_rom(&rom::writing(16, 15_000), &[]).with_disk();
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let source = Some(world.describe().await);
    let arm = v1::ArmReceiver { source, policy: Some(policy) };
    let listener = world.execute(Side::B, Action::ArmReceiver(arm)).await.unwrap().listener;
    let receiver_host = world.b.id.clone();
    let start = v1::StartTransfer { listener, policy: Some(policy), receiver_host };
    world.execute(Side::A, Action::StartTransfer(start)).await.unwrap();
    world
}

async fn judged(world: &mut World) -> v1::TransferStatus {
    let seen = world.wait(Side::A, "the verdict", |seen| !transfer(seen).diverges.is_empty()).await;
    transfer(&seen)
}

async fn finish(mut world: World) {
    world.wait_standing().await;
    world.order().await.unwrap();
    world.wait_complete().await;
    world.generation = 2;
    let seen = world.execute(Side::B, continue_destination()).await.unwrap().observation.unwrap();
    assert_eq!(seen.run_state, "running");
    world.execute(Side::A, release_source()).await.unwrap();
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_writes_too_fast_is_judged_and_moves_once_its_cap_is_raised() {
    let mut world = sending(policy()).await;
    let seen = judged(&mut world).await;
    assert!(seen.diverges.starts_with("will not converge: dirties "), "{}", seen.diverges);
    assert_eq!(seen.forecast, seen.diverges);
    assert_eq!(seen.limits, Some(limits(CAP, 0)));
    assert_eq!(seen.eta_ms, 0, "nobody knows when");
    world.a.restart().await;
    let known = |seen: &v1::VmObservation| {
        seen.knowledge() == v1::Knowledge::Known && transfer(seen).limits == Some(limits(CAP, 0))
    };
    world.wait(Side::A, "the limits to be known", known).await;
    let reply = world.execute(Side::A, set(limits(0, 500))).await.unwrap();
    let seen = transfer(&reply.observation.unwrap());
    assert_eq!(seen.limits, Some(limits(0, 500)));
    assert_eq!(seen.diverges, "", "that was by other limits");
    // The same once more does no harm, whatever has become of it.
    let again = world.execute(Side::A, set(limits(0, 500))).await;
    assert!(again.is_ok() || code(&again.unwrap_err()).1 == "wrong_state");
    finish(world).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_is_slowed_down_only_once_it_is_told_to() {
    let ready = v1::TransferPolicy { may_throttle: true, ..policy() };
    let mut world = sending(ready).await;
    let seen = judged(&mut world).await;
    assert!(seen.throttle_percent <= 1, "{seen:?}");
    let slower = v1::TransferLimits { throttle: true, ..limits(CAP, 0) };
    let reply = world.execute(Side::A, set(slower)).await.unwrap();
    assert_eq!(transfer(&reply.observation.unwrap()).limits, Some(slower));
    let slowed = |seen: &v1::VmObservation| {
        let seen = transfer(seen);
        seen.throttle_percent >= 10 || seen.status == "pre-switchover"
    };
    world.wait(Side::A, "the guest to be slowed down", slowed).await;
    finish(world).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_are_refused_where_they_change_nothing() {
    let mut world = sending(policy()).await;
    let slower = v1::TransferLimits { throttle: true, ..limits(CAP, 0) };
    let error = world.execute(Side::A, set(slower)).await.unwrap_err();
    assert_eq!(code(&error).1, "wrong_state", "it was not set up for it");
    let error = world.execute(Side::B, set(limits(1, 1))).await.unwrap_err();
    assert_eq!(code(&error).1, "wrong_state", "nothing is sent from there");
    let error = world.execute(Side::A, set(limits(0, 9_000_000))).await.unwrap_err();
    assert_eq!(code(&error).1, "invalid");
    world.execute(Side::A, set(limits(0, 500))).await.unwrap();
    world.wait_standing().await;
    world.order().await.unwrap();
    let error = world.execute(Side::A, set(limits(1, 1))).await.unwrap_err();
    assert_eq!(code(&error).1, "wrong_state", "it was ordered");
    world.wait_complete().await;
    world.end().await;
}
