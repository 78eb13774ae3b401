//! The fence, over the wire and over restarts.

use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;

use crate::world::{Side, World, code};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exact_repeat_is_answered_with_the_first_answer_even_after_a_restart() {
    let mut world = World::new().await;
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let source = Some(world.describe().await);
    let arm = world.request(Action::ArmReceiver(v1::ArmReceiver { source, policy: None }));
    let first = world.send(Side::B, arm.clone()).await.unwrap();
    let second = world.send(Side::B, arm.clone()).await.unwrap();
    world.b.restart().await;
    let third = world.send(Side::B, arm).await.unwrap();
    assert!(!first.replayed && second.replayed && third.replayed);
    for reply in [second, third] {
        assert_eq!(v1::ExecuteReply { replayed: false, ..reply }, first);
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_older_is_refused_with_what_is_known() {
    let mut world = World::new().await;
    world.start().await;
    world.admit(&[Side::A]).await;
    let forget = Action::ForgetVm(v1::ForgetVm {});
    let late = world.request(forget.clone());
    world.admit(&[Side::A]).await;
    let refused = world.send(Side::A, late.clone()).await.unwrap_err();
    assert_eq!(code(&refused), (tonic::Code::Aborted, "stale_claim".to_owned()));
    let detail: v1::ErrorDetail = prost::Message::decode(refused.details()).unwrap();
    assert_eq!(detail.known_claim, world.claim);
    world.a.restart().await;
    let refused = world.send(Side::A, late).await.unwrap_err();
    assert_eq!(code(&refused).1, "stale_claim");
    world.claim -= 1;
    assert_eq!(code(&world.claim(Side::A).await.unwrap_err()).1, "stale_claim");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_not_on_the_disk_is_not_held() {
    let mut world = World::new().await;
    world.admit(&[Side::A]).await;
    world.claim += 1;
    // What stands where the new record is to be written keeps every write from landing.
    let in_the_way = world.a.state_dir().join("vms").join(format!("{}.json.new", world.vm));
    std::fs::create_dir(&in_the_way).unwrap();
    for _ in 0..2 {
        assert_eq!(code(&world.claim(Side::A).await.unwrap_err()).1, "internal");
    }
    std::fs::remove_dir(&in_the_way).unwrap();
    world.claim(Side::A).await.unwrap();
    world.a.restart().await;
    assert_eq!(world.observe(Side::A).await.claim, world.claim);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_that_was_refused_uses_up_its_step() {
    let mut world = World::new().await;
    world.start().await;
    world.admit(&[Side::A]).await;
    let earlier = world.request(Action::ForgetVm(v1::ForgetVm {}));
    let refused = world.order().await.unwrap_err();
    assert_eq!(code(&refused).1, "wrong_state");
    let refused = world.send(Side::A, earlier).await.unwrap_err();
    assert_eq!(code(&refused).1, "stale_claim");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_makes_no_sense_is_refused_by_name() {
    let mut world = World::new().await;
    let empty = v1::ExecuteRequest::default();
    assert_eq!(code(&world.send(Side::A, empty).await.unwrap_err()).1, "invalid");
    let mut nothing = world.request(Action::ForgetVm(v1::ForgetVm {}));
    nothing.action = None;
    assert_eq!(code(&world.send(Side::A, nothing).await.unwrap_err()).1, "invalid");
    world.claim(Side::A).await.unwrap();
    let start = v1::StartVm { definition: "name = 1".to_owned(), ..v1::StartVm::default() };
    let refused = world.execute(Side::A, Action::StartVm(start)).await.unwrap_err();
    assert_eq!(code(&refused).1, "invalid");
    let seen = world.observe(Side::B).await;
    assert_eq!(seen.knowledge(), v1::Knowledge::UnknownVm);
    world.end().await;
}
