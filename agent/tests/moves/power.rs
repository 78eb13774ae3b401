//! Starting and stopping, and what an agent finds after its own death.

use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;

use crate::world::{Side, World, code, kill};

fn quit() -> Action {
    Action::StopVm(v1::StopVm { how: v1::StopHow::Quit.into(), deadline_ms: 0 })
}

fn start(world: &World) -> Action {
    let definition = world.definition.clone();
    Action::StartVm(v1::StartVm { definition, resolved_machine: String::new() })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_starts_stops_and_is_forgotten() {
    let mut world = World::new().await;
    world.start().await;
    let again = start(&world);
    let pid = world.observe(Side::A).await.qemu.unwrap().pid;
    let reply = world.execute(Side::A, again).await.unwrap();
    assert_eq!(reply.observation.unwrap().qemu.unwrap().pid, pid, "started once");
    world.admit(&[Side::A]).await;
    let twice = start(&world);
    let refused = world.execute(Side::A, twice).await.unwrap_err();
    assert_eq!(code(&refused).1, "wrong_state");
    let reply = world.execute(Side::A, quit()).await.unwrap();
    assert_eq!(reply.gone.unwrap().ended, "exited with code 0");
    assert_eq!(reply.observation.unwrap().role, "stopped");
    let forgot = world.execute(Side::A, Action::ForgetVm(v1::ForgetVm {})).await.unwrap();
    assert_eq!(forgot.observation.unwrap().role, "absent");
    assert_eq!(world.a.launches(), 0);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_another_qemu_holds_is_named_and_nothing_is_left_behind() {
    let mut world = World::new().await.with_disk();
    world.start().await;
    let name = world.vm.clone();
    world.vm = uuid::Uuid::new_v4().to_string();
    world.definition = world.definition.replace(&name, &world.vm);
    world.claim(Side::B).await.unwrap();
    let other = start(&world);
    let refused = world.execute(Side::B, other).await.unwrap_err();
    assert_eq!(code(&refused).1, "disk_in_use");
    assert!(refused.message().contains("qemu-system"), "{}", refused.message());
    assert_eq!(world.observe(Side::B).await.role, "absent");
    assert_eq!(world.b.launches(), 0);
    world.vm = name;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_qemu_that_cannot_start_says_why_and_leaves_nothing_behind() {
    let mut world = World::new().await;
    world.definition += "extra_args = ['-device', 'no-such-thing']\n";
    world.claim(Side::A).await.unwrap();
    let bad = start(&world);
    let refused = world.execute(Side::A, bad).await.unwrap_err();
    assert_eq!(code(&refused).1, "internal");
    assert!(refused.message().contains("no-such-thing"), "{}", refused.message());
    assert_eq!(world.observe(Side::A).await.role, "absent");
    assert_eq!(world.a.launches(), 0);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_outlives_its_agent_and_is_found_again() {
    let mut world = World::new().await;
    world.start().await;
    let before = world.observe(Side::A).await.qemu.unwrap();
    world.a.restart().await;
    let seen = world.wait(Side::A, "the guest", |seen| seen.run_state == "running").await;
    assert_eq!(seen.qemu.unwrap(), before);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_dies_is_proven_gone_and_may_be_started_again() {
    let mut world = World::new().await;
    world.start().await;
    kill(world.observe(Side::A).await.qemu.unwrap().pid);
    let dead = world.wait(Side::A, "the proof", |seen| seen.gone.is_some()).await;
    assert_eq!(
        (dead.gone.unwrap().kind(), dead.role.as_str()),
        (v1::ProofKind::ExitRecord, "running")
    );
    world.a.restart().await;
    let dead = world.wait(Side::A, "the proof again", |seen| seen.gone.is_some()).await;
    assert!(!dead.qemu.unwrap().alive);
    world.admit(&[Side::A]).await;
    let again = start(&world);
    let seen = world.execute(Side::A, again).await.unwrap().observation.unwrap();
    assert_eq!(seen.run_state, "running");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_record_stops_every_command_for_its_vm_alone() {
    let mut world = World::new().await;
    world.start().await;
    let pid = world.observe(Side::A).await.qemu.unwrap().pid;
    let record = world.a.state_dir().join("vms").join(format!("{}.json", world.vm));
    std::fs::write(record, b"{").unwrap();
    world.a.restart().await;
    assert_eq!(world.observe(Side::A).await.knowledge(), v1::Knowledge::Unreadable);
    let refused = world.execute(Side::A, quit()).await.unwrap_err();
    assert_eq!(code(&refused).1, "unreadable");
    let report = world.a.client.get_report(v1::GetReportRequest {}).await.unwrap().into_inner();
    assert!(report.journal_unreadable);
    assert!(report.strangers.iter().any(|stranger| stranger.contains(&format!("pid {pid} "))));
    kill(pid);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_report_says_what_runs_and_how_much_it_takes() {
    let mut world = World::new().await;
    world.start().await;
    let report = world.a.client.get_report(v1::GetReportRequest {}).await.unwrap().into_inner();
    let vm = &report.vms[0];
    assert_eq!(
        (vm.role.as_str(), vm.run_state.as_str(), vm.cpu_milli),
        ("running", "running", 1000)
    );
    assert!(vm.observed_memory_bytes > 10 << 20 && vm.configured_memory_bytes >= 64 << 20);
    let capabilities = report.capabilities.unwrap();
    assert!(capabilities.machine_types.iter().any(|machine| machine.starts_with("pc-q35-")));
    assert!(!report.journal_unreadable && !report.learning);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_whose_qemu_somebody_else_started_here_is_not_started_again() {
    let mut world = World::new().await;
    let mut stranger = std::process::Command::new("qemu-system-x86_64")
        .args(["-machine", "none", "-display", "none", "-nodefaults", "-S", "-uuid", &world.vm])
        .spawn()
        .unwrap();
    let report = loop {
        let report = world.a.client.get_report(v1::GetReportRequest {}).await.unwrap().into_inner();
        if report.strangers.iter().any(|stranger| stranger.contains(&world.vm)) {
            break report;
        }
    };
    assert!(report.vms.is_empty());
    world.claim(Side::A).await.unwrap();
    let refused = start(&world);
    let refused = world.execute(Side::A, refused).await.unwrap_err();
    assert_eq!(code(&refused).1, "wrong_state");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    world.start().await;
    world.end().await;
}
