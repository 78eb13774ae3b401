//! Guests that go before their memory, and channels that break meanwhile.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;

use crate::forward::continue_destination;
use crate::rom;
use crate::world::{Side, World, code, kill};

/// What the link carries, in bytes per second: memory takes a while to follow.
const RATE: usize = 12 << 20;
/// What it carries at a time, in bytes.
const PIECE: usize = 16 << 10;

/// A link between two hosts that can be cut.
struct Link {
    address: SocketAddr,
    cut: CancellationToken,
    _served: Arc<tokio::task::JoinSet<()>>,
}

impl Link {
    /// Leads to where a receiver listens.
    async fn to(listener: &v1::Listener) -> Self {
        let there = SocketAddr::new(
            listener.address.parse().unwrap(),
            u16::try_from(listener.port).unwrap(),
        );
        let here = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = here.local_addr().unwrap();
        let cut = CancellationToken::new();
        let ends = cut.clone();
        let mut served = tokio::task::JoinSet::new();
        served.spawn(async move {
            let mut both = tokio::task::JoinSet::new();
            while let Some(Ok((near, _))) = ends.run_until_cancelled(here.accept()).await {
                let far = TcpStream::connect(there).await.unwrap();
                let (near_read, near_write) = near.into_split();
                let (far_read, far_write) = far.into_split();
                both.spawn(ends.clone().run_until_cancelled_owned(carry(near_read, far_write)));
                both.spawn(ends.clone().run_until_cancelled_owned(carry(far_read, near_write)));
            }
        });
        Self { address, cut, _served: Arc::new(served) }
    }

    /// Where a source is to be sent.
    fn listener(&self, to: &v1::Listener) -> v1::Listener {
        v1::Listener { port: u32::from(self.address.port()), ..to.clone() }
    }
}

async fn carry(mut from: tokio::net::tcp::OwnedReadHalf, mut to: tokio::net::tcp::OwnedWriteHalf) {
    let mut piece = vec![0; PIECE];
    let mut pace = tokio::time::interval(Duration::from_micros((PIECE * 1_000_000 / RATE) as u64));
    pace.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while let Ok(read @ 1..) = from.read(&mut piece).await {
        if to.write_all(&piece[..read]).await.is_err() {
            return;
        }
        pace.tick().await;
    }
}

fn policy() -> v1::TransferPolicy {
    v1::TransferPolicy { postcopy: v1::Postcopy::Required.into(), ..v1::TransferPolicy::default() }
}

fn status(seen: &v1::VmObservation) -> &str {
    seen.transfer.as_ref().map_or("", |transfer| transfer.status.as_str())
}

/// A guest whose memory is all written to, and a receiver that takes it before its memory.
async fn armed() -> (World, v1::Listener) {
    let mut world = World::new().await.with_rom(&rom::touching(), &[]).with_disk();
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let source = Some(world.describe().await);
    let arm = v1::ArmReceiver { source, policy: Some(policy()) };
    let reply = world.execute(Side::B, Action::ArmReceiver(arm)).await.unwrap();
    let listener = reply.listener.unwrap();
    assert!(listener.postcopy && listener.preempt, "{listener:?}");
    (world, listener)
}

/// The same, standing at the switchover and told to go first.
async fn parted() -> (World, Link) {
    let (mut world, listener) = armed().await;
    let link = Link::to(&listener).await;
    let transfer = v1::StartTransfer {
        listener: Some(link.listener(&listener)),
        policy: Some(policy()),
        receiver_host: world.b.id.clone(),
    };
    world.execute(Side::A, Action::StartTransfer(transfer)).await.unwrap();
    world.wait(Side::A, "memory to cross", |seen| status(seen) == "active").await;
    let start = Action::StartPostcopy(v1::StartPostcopy {});
    world.execute(Side::A, start).await.unwrap();
    let seen = world.wait_standing().await;
    assert_eq!((seen.role.as_str(), seen.switched_off.len()), ("held", 1), "{seen:#?}");
    (world, link)
}

/// The same, ordered and let go on at the destination: its memory follows.
async fn divided() -> (World, Link) {
    let (mut world, link) = parted().await;
    world.order().await.unwrap();
    world.wait(Side::A, "the source to serve", |seen| status(seen) == "postcopy-active").await;
    world
        .wait(Side::B, "the guest to arrive", |seen| {
            status(seen) == "postcopy-active" && seen.run_state == "paused"
        })
        .await;
    world.generation = 2;
    let seen = world.execute(Side::B, continue_destination()).await.unwrap().observation.unwrap();
    assert_eq!((seen.role.as_str(), seen.run_state.as_str()), ("running", "running"));
    (world, link)
}

fn cancel() -> Action {
    Action::CancelTransfer(v1::CancelTransfer { cause: "asked".to_owned() })
}

fn release() -> Action {
    Action::ReleaseSource(v1::ReleaseSource { serves_no_more: true })
}

/// Mends the channel as a driver does; the new link stands until it is cut.
async fn mend(world: &mut World) -> Link {
    let recover = Action::RecoverReceiver(v1::RecoverReceiver {});
    let listener = world.execute(Side::B, recover.clone()).await.unwrap().listener.unwrap();
    assert_ne!(listener.doorbell, 0);
    let again = world.execute(Side::B, recover).await.unwrap().listener.unwrap();
    assert_eq!(again, listener, "it waits already");
    assert_eq!(world.observe(Side::B).await.waits_at, Some(listener.clone()));
    let link = Link::to(&listener).await;
    let resume = v1::ResumeTransfer { listener: Some(link.listener(&listener)) };
    world.execute(Side::A, Action::ResumeTransfer(resume)).await.unwrap();
    let flows = |seen: &v1::VmObservation| matches!(status(seen), "postcopy-active" | "completed");
    world.wait(Side::A, "the source to go on", flows).await;
    let seen = world.wait(Side::B, "the destination to go on", flows).await;
    assert_eq!(seen.waits_at, None);
    link
}

/// Waits for the last page, and releases the source.
async fn finish(mut world: World) {
    world.wait(Side::B, "the last page", |seen| status(seen) == "completed").await;
    world.wait(Side::A, "its acknowledgement", |seen| status(seen) == "completed").await;
    let gone = world.execute(Side::A, release()).await.unwrap().gone.unwrap();
    assert_eq!(gone.kind(), v1::ProofKind::ExitRecord);
    let seen = world.observe(Side::B).await;
    assert_eq!((seen.role.as_str(), seen.run_state.as_str()), ("running", "running"));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_goes_before_its_memory_and_there_is_no_way_back() {
    let (mut world, link) = divided().await;
    for (side, action) in [
        (Side::A, cancel()),
        (Side::A, Action::ReleaseSource(v1::ReleaseSource::default())),
        (
            Side::A,
            Action::ResumeSource(v1::ResumeSource {
                receiver_gone: Some(v1::GoneProof {
                    kind: v1::ProofKind::ExitRecord.into(),
                    host_id: "b".to_owned(),
                    ..v1::GoneProof::default()
                }),
            }),
        ),
        (
            Side::B,
            Action::DestroyReceiver(v1::DestroyReceiver {
                cause: "a trial".to_owned(),
                source_gone: None,
            }),
        ),
    ] {
        let refused = world.execute(side, action).await.unwrap_err();
        assert_eq!(code(&refused).1, "wrong_state", "{refused}");
    }
    finish(world).await;
    drop(link);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn before_the_order_a_guest_that_was_to_go_first_goes_on_here() {
    let (mut world, link) = parted().await;
    let seen = world.execute(Side::A, cancel()).await.unwrap().observation.unwrap();
    assert_eq!((seen.role.as_str(), seen.run_state.as_str()), ("running", "running"), "{seen:#?}");
    assert!(seen.gave_up && seen.switched_off.is_empty());
    let late = world.order().await.unwrap_err();
    assert_eq!(code(&late).1, "gave_up");
    drop(link);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_is_not_ordered_to_go_to_nobody() {
    let (mut world, link) = parted().await;
    kill(world.observe(Side::B).await.qemu.unwrap().pid);
    world.wait(Side::B, "its end", |seen| seen.gone.is_some()).await;
    // QEMU notes it without an event, in its own time.
    let broken = |seen: &v1::VmObservation| {
        seen.transfer.as_ref().is_some_and(|transfer| !transfer.error.is_empty())
    };
    world.wait(Side::A, "the source to note it", broken).await;
    let refused = world.order().await.unwrap_err();
    assert_eq!(code(&refused).1, "gave_up", "{refused}");
    let seen = world.observe(Side::A).await;
    assert_eq!((seen.run_state.as_str(), seen.handed), ("running", false), "{seen:#?}");
    drop(link);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_channel_that_is_cut_is_mended_again_and_again_by_whichever_agent() {
    let (mut world, mut link) = divided().await;
    for round in 0..3 {
        link.cut.cancel();
        let paused = |seen: &v1::VmObservation| status(seen) == "postcopy-paused";
        world.wait(Side::A, "the source to be paused", paused).await;
        world.wait(Side::B, "the destination to be paused", paused).await;
        if round == 1 {
            world.a.restart().await;
            world.b.restart().await;
            world.wait(Side::A, "the source's next agent to know it", paused).await;
            world.wait(Side::B, "the destination's next agent to know it", paused).await;
        }
        link = mend(&mut world).await;
    }
    finish(world).await;
    drop(link);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_half_whose_source_is_lost_is_ended_with_proof_only() {
    let (mut world, link) = divided().await;
    kill(world.observe(Side::A).await.qemu.unwrap().pid);
    let lost = world.wait(Side::A, "its end", |seen| seen.gone.is_some()).await.gone;
    let paused = |seen: &v1::VmObservation| status(seen) == "postcopy-paused";
    world.wait(Side::B, "the destination to be paused", paused).await;
    let destroy = |source_gone| {
        Action::DestroyReceiver(v1::DestroyReceiver { cause: "lost".to_owned(), source_gone })
    };
    let refused = world.execute(Side::B, destroy(None)).await.unwrap_err();
    assert_eq!(code(&refused).1, "wrong_state");
    let gone = world.execute(Side::B, destroy(lost)).await.unwrap().gone.unwrap();
    assert_eq!(gone.kind(), v1::ProofKind::ExitRecord);
    drop(link);
    world.end().await;
}
