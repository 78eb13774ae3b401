//! Several planners, and a host whose journal they have to make whole again.

use vmferry_proto::v1;

use crate::planner::Planner;
use crate::world::{Side, World, code};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_planner_is_told_and_each_report_is_one_of_its_own() {
    let (one, other) = (Planner::new().await, Planner::new().await);
    let world = World::with_planners(&[&one, &other]).await;
    let (first, second) =
        tokio::join!(one.wait("anything", |_| true), other.wait("anything", |_| true));
    assert_eq!((first.host_id.as_str(), second.host_id.as_str()), ("a", "a"));
    assert_eq!(first.agent_instance, second.agent_instance);
    let later = one.wait("a later one", |report| report.sequence > first.sequence).await;
    assert!(later.sequence != second.sequence);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_planner_keeps_no_other_from_being_told() {
    let one = Planner::new().await;
    let mut dead = Planner::new().await;
    dead.address = "127.0.0.1:1".parse().unwrap();
    let world = World::with_planners(&[&dead, &one]).await;
    one.wait("anything", |_| true).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_journal_proves_nothing_until_a_planner_has_said_what_it_knows() {
    let planner = Planner::new().await;
    planner.refuse();
    let mut world = World::with_planners(&[&planner]).await;
    // A planner that will not have the host has seeded nothing.
    planner.wait("an unreadable journal", |report| report.journal_unreadable).await;
    planner.wait("an unreadable journal", |report| report.journal_unreadable).await;
    assert_eq!(world.observe(Side::A).await.knowledge(), v1::Knowledge::Unreadable);
    world.claim(Side::A).await.unwrap();
    let start = v1::StartVm { definition: world.definition.clone(), ..v1::StartVm::default() };
    let start = v1::execute_request::Action::StartVm(start);
    let refused = world.execute(Side::A, start.clone()).await.unwrap_err();
    assert_eq!(code(&refused).1, "unreadable");
    planner.say(vec![world.owned("a", 7)]);
    let whole = planner.wait("a whole journal", |report| !report.journal_unreadable).await;
    let vm = whole.vms.iter().find(|vm| vm.vm_id == world.vm).unwrap();
    assert_eq!((vm.generation, vm.role.as_str()), (7, "absent"));
    let refused = world.execute(Side::A, start).await.unwrap_err();
    assert_eq!(code(&refused).1, "stale_generation");
    world.a.restart().await;
    let again = planner.wait("a report after a restart", |_| true).await;
    assert!(!again.journal_unreadable);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_journal_that_was_seeded_in_part_is_seeded_anew() {
    let planner = Planner::new().await;
    let mut world = World::with_planners(&[&planner]).await;
    planner.say(vec![world.owned("a", 3)]);
    planner.wait("a whole journal", |report| !report.journal_unreadable).await;
    // The agent dies before its last word on it, and only some of the records are there.
    world.a.stop().await;
    std::fs::remove_file(world.a.state_dir().join("host")).unwrap();
    planner.refuse();
    world.a.start().await;
    planner.wait("an unreadable journal", |report| report.journal_unreadable).await;
    world.claim += 4;
    let newer = v1::VmGeneration { vm_id: uuid::Uuid::new_v4().to_string(), ..world.owned("b", 9) };
    planner.say(vec![world.owned("a", 4), newer.clone()]);
    let whole = planner.wait("a whole journal", |report| !report.journal_unreadable).await;
    let generations: Vec<_> = whole.vms.iter().map(|vm| (vm.generation, vm.claim)).collect();
    assert!(generations.contains(&(4, world.claim)) && generations.contains(&(9, newer.claim)));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_record_of_a_vm_that_nobody_knows_is_listed_and_holds_nothing_up() {
    let planner = Planner::new().await;
    let mut world = World::with_planners(&[&planner]).await;
    planner.wait("a whole journal", |report| !report.journal_unreadable).await;
    world.a.stop().await;
    let record = world.a.state_dir().join("vms").join(format!("{}.json", world.vm));
    std::fs::write(&record, b"{ half").unwrap();
    planner.refuse();
    world.a.start().await;
    let broken = planner.wait("an unreadable journal", |report| report.journal_unreadable).await;
    assert_eq!((broken.orphans[0].kind.as_str(), &broken.orphans[0].vm_id), ("journal", &world.vm));
    // The planner, which was told so, names no such VM: it was deleted meanwhile.
    planner.say(Vec::new());
    let known = planner.wait("a whole journal", |report| !report.journal_unreadable).await;
    assert_eq!(known.orphans.len(), 1);
    assert!(record.exists(), "what is left is kept");
    let claimed = world.claim(Side::A).await.unwrap_err();
    assert_eq!(code(&claimed).1, "unreadable");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_claim_is_taken_without_a_planner_unless_an_admission_is_open() {
    let mut world = World::new().await;
    world.start().await;
    let mine = uuid::Uuid::new_v4().to_string();
    let taken = world.next_claim(Side::A, &mine).await.unwrap();
    assert_eq!((taken.claim, taken.migration_id.as_str()), (world.claim + 1, mine.as_str()));
    // An answer that was lost is given again, also by the next agent.
    world.a.restart().await;
    assert_eq!(world.next_claim(Side::A, &mine).await.unwrap().claim, taken.claim);
    let other = uuid::Uuid::new_v4().to_string();
    let refused = world.next_claim(Side::A, &other).await.unwrap_err();
    assert_eq!(code(&refused), (tonic::Code::FailedPrecondition, "migration_open".to_owned()));
    assert!(refused.message().contains(&mine));
    // Whoever began it goes on under the next.
    (world.migration, world.claim) = (mine.clone(), taken.claim);
    world.generation = taken.generation;
    world.claim(Side::B).await.unwrap();
    let listener = world.arm().await;
    world.transfer(listener).await.unwrap();
    world.wait_standing().await;
    assert_eq!(world.next_claim(Side::A, &mine).await.unwrap().claim, taken.claim + 1);
    let refused = world.next_claim(Side::A, &other).await.unwrap_err();
    assert_eq!(code(&refused).1, "migration_open");
    (world.claim, world.step) = (taken.claim + 1, 0);
    let cancel = v1::CancelTransfer { cause: "asked".to_owned() };
    let cancel = v1::execute_request::Action::CancelTransfer(cancel);
    world.execute(Side::A, cancel).await.unwrap();
    assert_eq!(world.next_claim(Side::A, &other).await.unwrap().claim, taken.claim + 2);
    let unknown = world.next_claim(Side::A, "").await.unwrap_err();
    assert_eq!(code(&unknown).1, "invalid");
    world.claim = taken.claim + 2;
    world.end().await;
}
