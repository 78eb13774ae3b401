//! The fence, over the wire and over restarts.

use futures::StreamExt as _;
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_for_vms_that_are_made_up_fill_neither_disk_nor_memory() {
    let mut world = World::new().await;
    world.start().await;
    let made_up = |_| v1::ClaimRequest {
        vm_id: uuid::Uuid::new_v4().to_string(),
        migration_id: uuid::Uuid::new_v4().to_string(),
        generation: 1,
        claim: 1,
        hold_limit_ms: 0,
    };
    let client = world.a.client.clone();
    let claims = (0..264).map(made_up).map(|request| {
        let mut client = client.clone();
        async move { client.claim(request).await }
    });
    let answers: Vec<_> = futures::stream::iter(claims).buffer_unordered(8).collect().await;
    let refused: Vec<_> = answers.into_iter().filter_map(Result::err).collect();
    let too_many = (tonic::Code::ResourceExhausted, "too_many_vms".to_owned());
    assert!(refused.iter().all(|refused| code(refused) == too_many), "{refused:?}");
    assert_eq!(refused.len(), 8);
    let records = std::fs::read_dir(world.a.state_dir().join("vms")).unwrap().count();
    assert_eq!(records, 256 + 1);
    // Whoever is here is commanded all the same.
    world.admit(&[Side::A]).await;
    world.end().await;
}

/// Sends every command of a side again: the last is answered as it was, all others are refused.
async fn again(world: &mut World, side: Side, sent: &[(v1::ExecuteRequest, v1::ExecuteReply)]) {
    let Some(((request, first), older)) = sent.split_last() else { return };
    for (request, _) in older {
        let refused = world.send(side, request.clone()).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::Aborted, "{request:?}");
    }
    let reply = world.send(side, request.clone()).await.unwrap();
    assert!(reply.replayed);
    assert_eq!(v1::ExecuteReply { replayed: false, ..reply }, *first);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_command_of_a_move_is_obeyed_once_however_often_and_late_it_comes() {
    let mut world = World::new().await;
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let (mut at_a, mut at_b) = (Vec::new(), Vec::new());
    let source = Some(world.describe().await);
    let arm = Action::ArmReceiver(v1::ArmReceiver { source, policy: None });
    let mut listener = None;
    let script = [
        (Side::B, 1, arm),
        (Side::A, 1, Action::StartTransfer(v1::StartTransfer::default())),
        (Side::A, 1, Action::OrderSwitchover(v1::OrderSwitchover {})),
        (Side::B, 2, Action::ContinueDestination(v1::ContinueDestination {})),
        (Side::A, 2, Action::ReleaseSource(v1::ReleaseSource::default())),
    ];
    for (side, generation, mut action) in script {
        if let Action::StartTransfer(transfer) = &mut action {
            transfer.listener = listener.clone();
        } else if let Action::OrderSwitchover(_) = action {
            world.wait_standing().await;
        } else if let Action::ContinueDestination(_) = action {
            world.wait_complete().await;
        }
        world.generation = generation;
        let request = world.request(action);
        let reply = world.send(side, request.clone()).await.unwrap();
        listener = reply.listener.clone().or(listener);
        let sent = if side == Side::A { &mut at_a } else { &mut at_b };
        sent.push((request, reply));
        again(&mut world, Side::A, &at_a).await;
        again(&mut world, Side::B, &at_b).await;
        world.host(side).restart().await;
        again(&mut world, Side::A, &at_a).await;
        again(&mut world, Side::B, &at_b).await;
    }
    let after = world.observe(Side::A).await;
    assert_eq!((after.role.as_str(), after.qemu), ("absent", None));
    let runs = |seen: &v1::VmObservation| seen.run_state == "running";
    assert_eq!(world.wait(Side::B, "the guest", runs).await.role, "running");
    // Nothing of the move is obeyed either once another admission has begun.
    world.admit(&[Side::A, Side::B]).await;
    for (side, sent) in [(Side::A, at_a), (Side::B, at_b)] {
        for (request, _) in sent {
            let refused = world.send(side, request).await.unwrap_err();
            assert_eq!(refused.code(), tonic::Code::Aborted);
        }
    }
    assert_eq!(world.observe(Side::B).await.run_state, "running");
    world.end().await;
}
