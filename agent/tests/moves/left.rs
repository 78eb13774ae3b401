//! What is left of VMs that are not a host's any more.

use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;

use crate::planner::Planner;
use crate::world::{Side, World, code, kill};

fn cancel() -> Action {
    Action::CancelTransfer(v1::CancelTransfer { cause: "asked".to_owned() })
}

/// Returns what is named of the world's VM.
fn left(world: &World, report: &v1::HostReport) -> Vec<(String, u64)> {
    let of_it = report.orphans.iter().filter(|orphan| orphan.vm_id == world.vm);
    of_it.map(|orphan| (orphan.kind.clone(), orphan.generation)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_was_started_elsewhere_meanwhile_never_goes_on_here() {
    let planner = Planner::new().await;
    let mut world = World::with_planners(&[&planner]).await;
    planner.wait("a whole journal", |report| !report.journal_unreadable).await;
    world.up_to_the_switchover().await;
    // The driver is gone, and the VM was started on b by a declaration.
    world.claim += 2;
    planner.say(vec![world.owned("b", 2)]);
    let report = planner.wait("an orphan", |report| !left(&world, report).is_empty()).await;
    assert_eq!(left(&world, &report), [("process".to_owned(), 2)]);
    // What the last driver said before comes late, and its hold limit is short.
    world.hold_limit_ms = 3_000;
    (world.claim, world.step) = (world.claim - 1, 0);
    world.claim(Side::A).await.unwrap();
    world.a.restart().await;
    planner.wait("an orphan", |report| !left(&world, report).is_empty()).await;
    let watch = v1::ObserveRequest { vm_id: world.vm.clone(), claim: 0 };
    let mut stream = world.a.client.watch(watch).await.unwrap().into_inner();
    let begun = world.observe(Side::A).await.observed_at_ms;
    let unheard = async {
        loop {
            let seen = stream.message().await.unwrap().unwrap();
            assert!(["", "finish-migrate"].contains(&seen.run_state.as_str()), "{seen:#?}");
            if seen.observed_at_ms > begun + 2 * world.hold_limit_ms {
                return seen;
            }
        }
    };
    let seen = tokio::time::timeout(crate::world::BOUND, unheard).await.unwrap();
    assert!(!seen.gave_up);
    let refused = world.execute(Side::A, cancel()).await.unwrap_err();
    assert_eq!(code(&refused).1, "stale_generation");
    // Only the word of whoever drives it under the newer generation ends it.
    world.generation = 2;
    world.admit(&[Side::A]).await;
    let release = Action::ReleaseSource(v1::ReleaseSource::default());
    let gone = world.execute(Side::A, release).await.unwrap().gone.unwrap();
    assert_eq!(gone.ended, "was ended by signal 9");
    planner.wait("no orphan", |report| left(&world, report).is_empty()).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_definition_of_a_vm_that_another_host_owns_is_listed_and_kept() {
    let planner = Planner::new().await;
    let mut world = World::with_planners(&[&planner]).await;
    planner.wait("a whole journal", |report| !report.journal_unreadable).await;
    world.start().await;
    let quit = v1::StopVm { how: v1::StopHow::Quit.into(), deadline_ms: 0 };
    world.execute(Side::A, Action::StopVm(quit)).await.unwrap();
    planner.say(vec![world.owned("a", 1)]);
    let own = planner.wait("the stopped VM", |report| !report.vms.is_empty()).await;
    assert_eq!((own.vms[0].role.as_str(), own.orphans.len()), ("stopped", 0));
    world.claim += 1;
    planner.say(vec![world.owned("b", 2)]);
    let report = planner.wait("an orphan", |report| !left(&world, report).is_empty()).await;
    assert_eq!(left(&world, &report), [("definition".to_owned(), 2)]);
    assert!(report.orphans[0].detail.contains("host b owns it under generation 2"));
    world.a.restart().await;
    let report = planner.wait("an orphan", |report| !left(&world, report).is_empty()).await;
    assert_eq!(report.vms[0].role, "stopped");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_left_in_the_directories_keeps_no_agent_from_starting() {
    let mut world = World::new().await;
    world.start().await;
    let pid = world.observe(Side::A).await.qemu.unwrap().pid;
    world.a.stop().await;
    let run_dir = world.a.run_dir();
    let launch = std::fs::read_dir(&run_dir).unwrap().flatten();
    let launch = launch.map(|entry| entry.path()).find(|path| path.is_dir()).unwrap();
    // Half of the launch's records are gone, and so is a definition's second half.
    std::fs::remove_file(launch.join("launch.json")).unwrap();
    std::fs::write(launch.join("process.json"), b"{").unwrap();
    let nobody = uuid::Uuid::new_v4();
    let records = world.a.state_dir().join("vms");
    std::fs::write(records.join(format!("{nobody}.json")), b"{ \"version\": 1,").unwrap();
    std::fs::create_dir(records.join(format!("{}.json", uuid::Uuid::new_v4()))).unwrap();
    let lone = run_dir.join("00000000-00000000");
    std::fs::create_dir(&lone).unwrap();
    std::fs::write(lone.join("process.json"), b"{").unwrap();
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(60);
    std::fs::File::open(&lone).unwrap().set_modified(old).unwrap();
    world.a.start().await;
    // The process is known by the journal's own note, and fences its VM alone.
    let silent = |seen: &v1::VmObservation| seen.knowledge() == v1::Knowledge::Unresponsive;
    let seen = world.wait(Side::A, "the process", silent).await;
    assert_eq!(seen.qemu.unwrap().pid, pid);
    let report = world.a.report().await;
    assert!(!report.learning && report.journal_unreadable);
    let mut kinds: Vec<_> = report.orphans.iter().map(|orphan| orphan.kind.as_str()).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["journal", "journal", "launch_dir"]);
    assert!(lone.exists());
    kill(pid);
    world.wait(Side::A, "the end", |seen| seen.gone.is_some()).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_no_record_names_is_named_and_not_started_again() {
    let mut world = World::new().await;
    world.start().await;
    let pid = world.observe(Side::A).await.qemu.unwrap().pid;
    world.a.stop().await;
    // The journal is lost, and the new agent keeps its launches elsewhere.
    std::fs::remove_dir_all(world.a.state_dir()).unwrap();
    world.a.reconfigure("/run'", "/run2'");
    world.a.start().await;
    let report = world.a.report().await;
    assert!(report.strangers.iter().any(|stranger| stranger.contains(&world.vm)));
    let unknown = world.observe(Side::A).await;
    assert_eq!(unknown.knowledge(), v1::Knowledge::Unreadable);
    assert!(unknown.trouble.contains("the journal does not know"), "{}", unknown.trouble);
    world.admit(&[Side::A]).await;
    let start = v1::StartVm { definition: world.definition.clone(), ..v1::StartVm::default() };
    let refused = world.execute(Side::A, Action::StartVm(start)).await.unwrap_err();
    assert_eq!(code(&refused).1, "wrong_state");
    assert!(refused.message().contains("another QEMU of this VM runs here"), "{refused:?}");
    let quit = v1::StopVm { how: v1::StopHow::Quit.into(), deadline_ms: 0 };
    let unproven = world.execute(Side::A, Action::StopVm(quit)).await.unwrap_err();
    assert_eq!(code(&unproven).1, "wrong_state");
    let report = world.a.report().await;
    let known = report.vms.iter().find(|vm| vm.vm_id == world.vm).unwrap();
    assert_eq!(known.knowledge(), v1::Knowledge::Unreadable);
    assert_eq!(left(&world, &report), [("process".to_owned(), 0)]);
    kill(pid);
    world.end().await;
}
