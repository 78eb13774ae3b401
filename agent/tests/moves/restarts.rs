//! What an agent says that was restarted, whose host was, or whose planner cannot be reached.

use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;

use crate::planner::Planner;
use crate::world::{Side, World, code, freeze, kill, until};

fn quit() -> Action {
    Action::StopVm(v1::StopVm { how: v1::StopHow::Quit.into(), deadline_ms: 0 })
}

fn known(seen: &v1::VmObservation) -> bool {
    seen.knowledge() == v1::Knowledge::Known
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_that_was_never_here_is_not_said_to_be_stopped() {
    let mut world = World::new().await;
    let refused = world.execute(Side::A, quit()).await.unwrap_err();
    assert_eq!(code(&refused), (tonic::Code::NotFound, "unknown_vm".to_owned()));
    let seen = world.observe(Side::A).await;
    assert_eq!((seen.knowledge(), seen.role.as_str()), (v1::Knowledge::UnknownVm, "absent"));
    assert_eq!(seen.boot_id, world.a.report().await.boot_id);
    // Whoever claims it first is answered with the journal's proof, under this boot.
    world.claim(Side::A).await.unwrap();
    let gone = world.execute(Side::A, quit()).await.unwrap().gone.unwrap();
    assert_eq!((gone.kind(), gone.boot_id), (v1::ProofKind::NeverStarted, seen.boot_id));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_that_ran_before_its_host_was_booted_is_proven_gone_and_stops() {
    let mut world = World::new().await;
    world.start().await;
    let pid = world.observe(Side::A).await.qemu.unwrap().pid;
    let boot = world.a.report().await.boot_id;
    world.a.stop().await;
    kill(pid);
    // What a boot leaves: the journal, and no directory of sockets. The shim may be writing the end
    // into it.
    until(|| {
        let _again = std::fs::remove_dir_all(world.a.run_dir());
        !world.a.run_dir().exists()
    })
    .await;
    let record = world.a.state_dir().join("vms").join(format!("{}.json", world.vm));
    let text = std::fs::read_to_string(&record).unwrap();
    std::fs::write(&record, text.replace(&boot, "another-boot")).unwrap();
    world.a.start().await;
    let seen = world.wait(Side::A, "the end", |seen| seen.gone.is_some()).await;
    assert_eq!((seen.role.as_str(), seen.boot_id), ("running", boot.clone()));
    let gone = seen.gone.unwrap();
    assert_eq!((gone.kind(), &gone.boot_id), (v1::ProofKind::NewBoot, &boot));
    world.admit(&[Side::A]).await;
    let stopped = world.execute(Side::A, quit()).await.unwrap();
    assert_eq!(stopped.gone.unwrap().kind(), v1::ProofKind::NewBoot);
    assert_eq!(stopped.observation.unwrap().role, "stopped");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_takes_long_to_learn_says_so_and_calls_nobody_gone() {
    let planner = Planner::new().await;
    let mut world = World::with_planners(&[&planner]).await;
    planner.wait("a whole journal", |report| !report.journal_unreadable).await;
    world.start().await;
    let pid = world.observe(Side::A).await.qemu.unwrap().pid;
    world.a.stop().await;
    freeze(pid);
    world.a.start().await;
    let learning = planner.wait("a host that learns", |report| report.learning).await;
    assert_eq!(learning.vms[0].knowledge(), v1::Knowledge::Learning);
    assert_eq!((learning.vms[0].role.as_str(), &learning.vms[0].gone), ("running", &None));
    let refused = world.execute(Side::A, quit()).await.unwrap_err();
    assert_eq!(code(&refused), (tonic::Code::Unavailable, "learning".to_owned()));
    let learnt = planner.wait("a host that has learnt", |report| !report.learning).await;
    assert_eq!(learnt.vms[0].knowledge(), v1::Knowledge::Unresponsive);
    assert_eq!((learnt.vms[0].role.as_str(), &learnt.vms[0].gone), ("running", &None));
    let thaw = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    nix::sys::signal::kill(thaw, nix::sys::signal::Signal::SIGCONT).unwrap();
    assert_eq!(world.wait(Side::A, "the guest", known).await.run_state, "running");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_planner_that_cannot_be_reached_costs_no_guest_anything() {
    let planner = Planner::new().await;
    let mut world = World::with_planners(&[&planner]).await;
    planner.wait("a whole journal", |report| !report.journal_unreadable).await;
    world.start().await;
    let before = world.wait(Side::A, "the guest", known).await;
    planner.fail();
    for _ in 0..3 {
        planner.wait("a report in vain", |_| true).await;
    }
    planner.say(vec![world.owned("a", 1)]);
    let told = planner.wait("the VM", |report| report.vms.len() == 1).await;
    assert_eq!((told.vms[0].role.as_str(), told.vms[0].run_state.as_str()), ("running", "running"));
    let after = world.observe(Side::A).await;
    assert_eq!((after.qemu, after.claim, after.step), (before.qemu, before.claim, before.step));
    assert_eq!(after.stopped_at_us, 0);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_monitor_fences_its_vm_and_no_other_on_the_host() {
    let mut world = World::new().await;
    world.start().await;
    let frozen = world.observe(Side::A).await.qemu.unwrap().pid;
    freeze(frozen);
    world.wait(Side::A, "silence", |seen| seen.knowledge() == v1::Knowledge::Unresponsive).await;
    let first = world.vm.clone();
    world.vm = uuid::Uuid::new_v4().to_string();
    world.definition = world.definition.replace(&first, &world.vm).replace("idle'", "other'");
    world.step = 0;
    world.start().await;
    let gone = world.execute(Side::A, quit()).await.unwrap().gone.unwrap();
    assert_eq!(gone.kind(), v1::ProofKind::ExitRecord);
    let report = world.a.report().await;
    let silent = report.vms.iter().find(|vm| vm.vm_id == first).unwrap();
    assert_eq!((silent.knowledge(), &silent.gone), (v1::Knowledge::Unresponsive, &None));
    assert!(!report.learning && !report.journal_unreadable);
    world.vm = first;
    world.end().await;
}
