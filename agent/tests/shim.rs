//! A shim and its QEMU, against the real binary and a real QEMU.

#![expect(clippy::unwrap_used, clippy::panic, reason = "what helps a test fails as the test does")]

use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use vmferry_agent::monitor::{Delivery, Heard, MonitorError};
use vmferry_agent::process::{
    Adopted, Evidence, Exit, Judgement, LAUNCH_DEADLINE, LaunchError, Launcher, LauncherKind,
    OobError, ProcessDir, ProcessIdentity, QemuProcess, adopt, adopt_within, judge,
    kill_and_prove_gone, launch, scan,
};
use vmferry_agent::shim::{OobState, ShimClient};
use vmferry_qmp::command::{
    Cont, Migrate, MigratePause, MigrateSetCapabilities, QueryStatus, QueryYank, Quit, Yank,
};
use vmferry_qmp::{EventView, MigrationStatus, RunState};

const SHIM: &str = env!("CARGO_BIN_EXE_vmferry-agent");
const BOUND: Duration = Duration::from_secs(20);
/// What is waited for that will not come.
const SHORT: Duration = Duration::from_millis(200);

/// A directory whose process does not outlive the test.
struct Trial {
    _temporary: tempfile::TempDir,
    dir: ProcessDir,
}

impl Trial {
    fn new() -> Self {
        let temporary = tempfile::Builder::new().prefix("vmferry-shim-").tempdir().unwrap();
        let dir = ProcessDir::new(temporary.path().join("vm"));
        Self { _temporary: temporary, dir }
    }

    async fn launch(&self) -> QemuProcess {
        self.try_launch(&qemu_argv()).await.unwrap()
    }

    async fn try_launch(&self, argv: &[String]) -> Result<QemuProcess, LaunchError> {
        let launcher = Launcher::new(LauncherKind::Detached, SHIM);
        launch(&self.dir, argv, &launcher, LAUNCH_DEADLINE).await
    }

    /// Starts a shim by hand, as the launcher would.
    fn shim(&self, launch_json: &str) -> std::process::Child {
        self.dir.create().unwrap();
        std::fs::write(self.dir.path().join("launch.json"), launch_json).unwrap();
        self.shim_again()
    }

    fn shim_again(&self) -> std::process::Child {
        Command::new(SHIM)
            .args(["shim", "--dir"])
            .arg(self.dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn client(&self) -> ShimClient {
        ShimClient::new(&self.dir)
    }

    /// Waits for the shim to have its monitor.
    async fn way_in(&self) {
        let start = Instant::now();
        while self.client().status(BOUND).await.unwrap().oob != OobState::Connected {
            assert!(Instant::now().duration_since(start) < BOUND);
        }
    }

    fn shim_pid(&self) -> Option<u32> {
        let found = scan().unwrap();
        found.shims.iter().find(|shim| shim.dir == self.dir.path()).map(|shim| shim.identity.pid)
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        if let Ok(Judgement::Alive(identity)) = judge(&self.dir) {
            signal(identity.pid, Signal::SIGKILL);
        }
        if let Some(pid) = self.shim_pid() {
            signal(pid, Signal::SIGKILL);
        }
    }
}

fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap());
    kill(pid, signal).unwrap();
}

fn qemu_argv() -> Vec<String> {
    let line = "qemu-system-x86_64 -nodefaults -no-user-config -display none -machine none -S \
                -uuid 5f0e7a3c-1111-4222-8333-944445555666 -name guest=trial";
    line.split_ascii_whitespace().map(str::to_owned).collect()
}

/// Waits, within a bound, until `level` holds.
async fn until(what: &str, mut level: impl FnMut() -> bool) {
    let start = Instant::now();
    let mut ticks = tokio::time::interval(Duration::from_millis(2));
    while !level() {
        assert!(Instant::now().duration_since(start) < BOUND, "not within {BOUND:?}: {what}");
        ticks.tick().await;
    }
}

/// Makes QEMU's main loop wait for a client that never comes.
async fn block_main_loop(qemu: &QemuProcess) {
    let path = qemu.path().join("nobody.sock");
    let arguments = json!({"id": "blocker", "backend": {"type": "socket", "data": {
        "addr": {"type": "unix", "data": {"path": path}}, "server": true, "wait": true
    }}});
    let deadline = Duration::from_millis(300);
    let stuck = qemu.monitor().execute_raw("chardev-add", arguments, deadline).await;
    let Err(MonitorError::Silent { delivery: Delivery::Sent, .. }) = stuck else {
        panic!("the main loop was to be stuck: {stuck:?}");
    };
}

#[tokio::test]
async fn a_launched_qemu_answers_and_its_kill_leaves_a_record() {
    let trial = Trial::new();
    let qemu = trial.launch().await;
    let status = qemu.monitor().execute(QueryStatus {}).await.unwrap();
    assert_eq!(status.status, RunState::PreLaunch);
    assert!(qemu.monitor().oob());
    let read = ProcessIdentity::read(qemu.identity().pid).unwrap();
    assert_eq!(read.as_ref(), Some(qemu.identity()));

    let proof = qemu.kill_and_prove_gone(BOUND).await.unwrap();
    let record = proof.exit_record().unwrap();
    assert_eq!(record.exit, Exit::Signal { signal: 9 });
    assert_eq!(record.identity.as_ref(), Some(qemu.identity()));
    assert_eq!(trial.dir.read_exit().unwrap().as_ref(), Some(record));
    qemu.monitor().closed().await;
    until("the shim was let go", || trial.shim_pid().is_none()).await;
    // The same again, and an hour late, is the same answer.
    assert_eq!(kill_and_prove_gone(&trial.dir, BOUND).await.unwrap(), proof);
}

#[tokio::test]
async fn a_qemu_is_adopted_after_everything_was_dropped() {
    let trial = Trial::new();
    let first = trial.launch().await;
    let identity = first.identity().clone();
    drop(first);
    let Adopted::Alive(qemu) = adopt(&trial.dir).await else { panic!("it lives") };
    assert_eq!(qemu.identity(), &identity);
    qemu.monitor().execute(QueryStatus {}).await.unwrap();
    let status = qemu.shim_status(BOUND).await.unwrap();
    assert_eq!(status.identity.as_ref(), Some(&identity));
    assert_eq!(status.exit, None);
}

#[tokio::test]
async fn events_are_heard_and_the_exit_code_is_recorded() {
    let trial = Trial::new();
    let qemu = trial.launch().await;
    let mut events = qemu.events();
    qemu.monitor().execute(Cont {}).await.unwrap();
    let Some(Heard::Event(event)) = events.next().await else { panic!("an event was due") };
    assert_eq!(event.view(), EventView::Resume);
    qemu.monitor().execute(Quit {}).await.unwrap();
    let proof = qemu.exited().await.unwrap();
    assert_eq!(proof.exit_record().unwrap().exit, Exit::Code { code: 0 });
    let Adopted::Gone(again) = adopt(&trial.dir).await else { panic!("it is gone") };
    assert_eq!(again, proof);
}

#[tokio::test]
async fn without_its_shim_a_qemu_goes_on_and_is_judged_by_its_identity() {
    let trial = Trial::new();
    let qemu = trial.launch().await;
    signal(trial.shim_pid().unwrap(), Signal::SIGKILL);
    until("the shim is gone", || trial.shim_pid().is_none()).await;
    qemu.monitor().execute(QueryStatus {}).await.unwrap();
    assert!(matches!(judge(&trial.dir), Ok(Judgement::Alive(_))));

    // Launched here, so the second monitor is taken when it is needed.
    qemu.oob(QueryYank {}, BOUND).await.unwrap();
    drop(qemu);
    let Adopted::Alive(qemu) = adopt(&trial.dir).await else { panic!("it lives") };
    qemu.oob(QueryYank {}, BOUND).await.unwrap();

    let proof = qemu.kill_and_prove_gone(BOUND).await.unwrap();
    let absent = Evidence::Absent { identity: qemu.identity().clone() };
    assert_eq!(proof.evidence(), &absent);
}

#[tokio::test]
async fn a_killed_qemu_is_recorded_by_its_shim() {
    let trial = Trial::new();
    let qemu = trial.launch().await;
    signal(qemu.identity().pid, Signal::SIGKILL);
    let proof = qemu.exited().await.unwrap();
    assert_eq!(proof.exit_record().unwrap().exit, Exit::Signal { signal: 9 });
}

#[tokio::test]
async fn a_shim_whose_directory_was_removed_ends_with_its_qemu() {
    let trial = Trial::new();
    let qemu = trial.launch().await;
    std::fs::remove_dir_all(trial.dir.path()).unwrap();
    signal(qemu.identity().pid, Signal::SIGKILL);
    until("the shim ends", || trial.shim_pid().is_none()).await;
}

#[tokio::test]
async fn a_program_that_is_not_there_is_an_exit_with_its_reason() {
    let trial = Trial::new();
    let failed = trial.try_launch(&["/no/such/qemu".to_owned()]).await;
    let Err(LaunchError::Exited { record }) = failed else { panic!("not {failed:?}") };
    let Exit::ExecFailed { error } = &record.exit else { panic!("not {record:?}") };
    assert!(error.contains("No such file"), "{error}");
    assert!(matches!(judge(&trial.dir), Ok(Judgement::Gone(_))));
}

#[tokio::test]
async fn what_qemu_said_before_it_gave_up_is_in_the_error() {
    let trial = Trial::new();
    let mut argv = qemu_argv();
    argv.push("-no-such-option".to_owned());
    let failed = trial.try_launch(&argv).await;
    let Err(error @ LaunchError::Exited { .. }) = failed else { panic!("not {failed:?}") };
    let text = error.to_string();
    assert!(text.contains("-no-such-option") && text.contains("code 1"), "{text}");
}

#[tokio::test]
async fn a_shim_that_cannot_begin_says_why() {
    let trial = Trial::new();
    trial.dir.create().unwrap();
    // In the way of the shim's socket, and not to be removed as a file.
    std::fs::create_dir(trial.dir.shim_socket()).unwrap();
    let failed = trial.try_launch(&qemu_argv()).await;
    let Err(LaunchError::ShimEnded { said, .. }) = failed else { panic!("not {failed:?}") };
    assert!(said.contains("nothing was started"), "{said}");
    let Ok(Judgement::Gone(proof)) = judge(&trial.dir) else { panic!("nothing was started") };
    assert_eq!(proof.exit_record().unwrap().exit, Exit::NeverStarted);
}

/// Some hundred launches under load found one that hung; this many at once
/// still find what is worse than that.
#[tokio::test]
async fn launches_side_by_side_all_answer() {
    let trials: Vec<Trial> = (0..8).map(|_| Trial::new()).collect();
    let launches = trials.iter().map(|trial| async {
        let qemu = trial.launch().await;
        qemu.kill_and_prove_gone(BOUND).await.unwrap();
    });
    futures::future::join_all(launches).await;
}

#[tokio::test]
async fn a_directory_is_never_launched_in_twice() {
    let trial = Trial::new();
    let qemu = trial.launch().await;
    let again = trial.try_launch(&qemu_argv()).await;
    assert!(matches!(again, Err(LaunchError::UsedBefore { .. })), "{again:?}");
    let mut second = trial.shim_again();
    assert!(!second.wait().unwrap().success());
    qemu.monitor().execute(QueryStatus {}).await.unwrap();
    qemu.kill_and_prove_gone(BOUND).await.unwrap();
    until("the shim was let go", || trial.shim_pid().is_none()).await;
    let mut late = trial.shim_again();
    assert!(!late.wait().unwrap().success());
}

#[tokio::test]
async fn a_shim_that_comes_after_the_judgement_starts_nothing() {
    let trial = Trial::new();
    assert!(judge(&trial.dir).is_err(), "there is no directory, and that proves nothing");
    trial.dir.create().unwrap();
    let marker = trial.dir.path().join("started");
    let launch_json = json!({"argv": ["touch", &marker]}).to_string();
    std::fs::write(trial.dir.path().join("launch.json"), launch_json).unwrap();
    let Ok(Judgement::Gone(proof)) = judge(&trial.dir) else { panic!("nobody started it") };
    assert_eq!(proof.exit_record().unwrap().exit, Exit::NeverStarted);
    assert!(!trial.shim_again().wait().unwrap().success());
    assert!(!marker.exists());
}

#[tokio::test]
async fn a_directory_that_was_only_made_is_never_launched_in() {
    let trial = Trial::new();
    trial.dir.create().unwrap();
    // While any QEMU of this machine, another test's perhaps, is just ending and does not show
    // what it is, an empty finding proves nothing.
    until("nothing was launched", || matches!(judge(&trial.dir), Ok(Judgement::Gone(_)))).await;
    let Ok(Judgement::Gone(proof)) = judge(&trial.dir) else { panic!("it was gone") };
    assert_eq!(proof.exit_record().unwrap().exit, Exit::NeverStarted);
    let late = trial.try_launch(&qemu_argv()).await;
    assert!(matches!(late, Err(LaunchError::ShimEnded { .. })), "{late:?}");
}

#[tokio::test]
async fn an_emptied_directory_proves_nothing_about_what_runs() {
    let trial = Trial::new();
    let qemu = trial.launch().await;
    let shim = trial.shim_pid().unwrap();
    for entry in std::fs::read_dir(trial.dir.path()).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    let judged = judge(&trial.dir);
    signal(qemu.identity().pid, Signal::SIGKILL);
    signal(shim, Signal::SIGKILL);
    assert!(judged.is_err(), "{judged:?}");
}

#[tokio::test]
async fn a_shim_withstands_the_signals_that_end_others() {
    let trial = Trial::new();
    let qemu = trial.launch().await;
    let shim = trial.shim_pid().unwrap();
    for sent in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        signal(shim, sent);
    }
    let log = trial.dir.path().join("shim.log");
    let noted = || std::fs::read_to_string(&log).is_ok_and(|text| text.contains("SIGTERM came"));
    until("the signal is noted", noted).await;
    assert_eq!(qemu.shim_status(BOUND).await.unwrap().exit, None);
    // The child did not inherit that: QEMU still ends in good order. Then
    // nobody needs to say `bye` any more.
    signal(qemu.identity().pid, Signal::SIGTERM);
    until("the exit is recorded", || trial.dir.read_exit().unwrap().is_some()).await;
    until("the shim has gone by itself", || trial.shim_pid().is_none()).await;
    let proof = qemu.exited().await.unwrap();
    assert_eq!(proof.exit_record().unwrap().exit, Exit::Code { code: 0 });
}

#[tokio::test]
async fn a_shim_outlives_whoever_started_it() {
    let trial = Trial::new();
    trial.dir.create().unwrap();
    let argv = ["sleep", "1000"];
    std::fs::write(trial.dir.path().join("launch.json"), json!({"argv": argv}).to_string())
        .unwrap();
    let line = format!("{SHIM} shim --dir {} & wait", trial.dir.path().display());
    let mut starter = Command::new("sh").arg("-c").arg(line).process_group(0).spawn().unwrap();
    // Not by `judge`, which would forbid the start if it came first.
    until("it was started", || trial.dir.read_process().unwrap().is_some()).await;
    let group = Pid::from_raw(-i32::try_from(starter.id()).unwrap());
    kill(group, Signal::SIGKILL).unwrap();
    starter.wait().unwrap();
    let status = trial.client().status(BOUND).await.unwrap();
    assert_eq!(status.exit, None);
    assert_eq!(status.identity, trial.dir.read_process().unwrap());
    let proof = kill_and_prove_gone(&trial.dir, BOUND).await.unwrap();
    assert_eq!(proof.exit_record().unwrap().exit, Exit::Signal { signal: 9 });
}

#[tokio::test]
async fn migration_events_are_remembered_while_the_agent_is_away() {
    let trial = Trial::new();
    let qemu = trial.launch().await;
    trial.way_in().await;
    qemu.monitor().execute(MigrateSetCapabilities::new(&["events"], &[])).await.unwrap();
    let nowhere = Migrate { uri: "exec:cat >/dev/null".to_owned(), resume: None };
    qemu.monitor().execute(nowhere).await.unwrap();
    drop(qemu);
    let client = trial.client();
    let start = Instant::now();
    loop {
        let status = client.status(BOUND).await.unwrap();
        if let Some(last) = status.migrations.last()
            && last.status == MigrationStatus::Completed
        {
            assert_eq!(status.migrations[0].status, MigrationStatus::Setup);
            break;
        }
        assert!(Instant::now().duration_since(start) < BOUND, "{status:?}");
    }
}

#[tokio::test]
async fn a_way_in_stays_open_while_the_main_loop_is_stuck() {
    let trial = Trial::new();
    let qemu = trial.launch().await;
    trial.way_in().await;
    block_main_loop(&qemu).await;
    let silent = qemu.monitor().execute_within(QueryStatus {}, Duration::from_millis(100)).await;
    assert!(matches!(silent, Err(MonitorError::Silent { .. })), "{silent:?}");
    qemu.oob(QueryYank {}, BOUND).await.unwrap();
    let refused = qemu.oob(MigratePause {}, BOUND).await;
    assert!(matches!(refused, Err(OobError::Shim { .. })), "{refused:?}");

    // An agent that restarts now is not greeted, and still has the way in.
    drop(qemu);
    let Adopted::Unresponsive(silent) = adopt_within(&trial.dir, SHORT).await else {
        panic!("it is stuck")
    };
    assert!(matches!(silent.cause, MonitorError::NotGreeted { .. }), "{:?}", silent.cause);
    silent.oob.execute(Yank { instances: vec![] }, BOUND).await.unwrap();
    let proof = kill_and_prove_gone(&trial.dir, BOUND).await.unwrap();
    assert_eq!(proof.exit_record().unwrap().exit, Exit::Signal { signal: 9 });
}

#[tokio::test]
async fn a_stopped_qemu_is_unresponsive_and_not_gone() {
    let trial = Trial::new();
    let qemu = trial.launch().await;
    let identity = qemu.identity().clone();
    signal(identity.pid, Signal::SIGSTOP);
    drop(qemu);
    let Adopted::Unresponsive(silent) = adopt_within(&trial.dir, SHORT).await else {
        panic!("it is stopped")
    };
    assert_eq!(silent.identity, identity);
    kill_and_prove_gone(&trial.dir, BOUND).await.unwrap();
}

#[tokio::test]
async fn another_boot_or_another_start_time_proves_absence() {
    let trial = Trial::new();
    trial.dir.create().unwrap();
    let own = ProcessIdentity::read(std::process::id()).unwrap().unwrap();
    let write = |identity: &ProcessIdentity| {
        let json = serde_json::to_vec(identity).unwrap();
        std::fs::write(trial.dir.path().join("process.json"), json).unwrap();
    };
    let past = ProcessIdentity { boot_id: "before".to_owned(), ..own.clone() };
    write(&past);
    let Adopted::Gone(proof) = adopt(&trial.dir).await else { panic!("another boot") };
    assert!(matches!(proof.evidence(), Evidence::NewBoot { identity, .. } if *identity == past));

    // Our own pid, as it would be if it had been given to another process.
    let reused = ProcessIdentity { start_time: own.start_time - 1, ..own };
    write(&reused);
    let proof = kill_and_prove_gone(&trial.dir, BOUND).await.unwrap();
    assert_eq!(proof.evidence(), &Evidence::Absent { identity: reused });
}

#[tokio::test]
async fn a_damaged_record_is_unknown() {
    let trial = Trial::new();
    trial.dir.create().unwrap();
    std::fs::write(trial.dir.path().join("process.json"), "{").unwrap();
    assert!(matches!(adopt(&trial.dir).await, Adopted::Unknown(_)));
    assert!(kill_and_prove_gone(&trial.dir, BOUND).await.is_err());
}

#[tokio::test]
async fn a_scan_finds_the_qemu_and_its_shim() {
    let trial = Trial::new();
    let qemu = trial.launch().await;
    let found = scan().unwrap();
    let own = found.qemus.iter().find(|found| found.identity == *qemu.identity()).unwrap();
    assert_eq!(own.uuid.unwrap().to_string(), "5f0e7a3c-1111-4222-8333-944445555666");
    assert_eq!(own.name.as_deref(), Some("trial"));
    assert_eq!(own.dir.as_deref(), Some(trial.dir.path()));
    assert!(trial.shim_pid().is_some());
}

#[tokio::test]
async fn what_is_said_on_stderr_stays_bounded() {
    let trial = Trial::new();
    let line = "yes 0123456789abcdef | head -c 4000000; echo the end >&2; exec sleep 1000";
    let mut shim = trial.shim(&json!({"argv": ["sh", "-c", line]}).to_string());
    let log = trial.dir.qemu_log();
    let occupied = || log.metadata().map_or(u64::MAX, |metadata| metadata.blocks() * 512);
    let ended = || std::fs::read_to_string(&log).is_ok_and(|text| text.ends_with("the end\n"));
    until("all is written, and its beginning freed", || ended() && occupied() < 2 << 20).await;
    let tail = trial.client().stderr_tail(8, BOUND).await.unwrap();
    assert_eq!(tail, "the end\n");
    let record = trial.client().kill(BOUND).await.unwrap();
    assert!(record.stderr_tail.ends_with("the end\n"));
    trial.client().bye(BOUND).await.unwrap();
    assert!(shim.wait().unwrap().success());
}

#[tokio::test]
async fn a_shim_serves_several_clients_and_is_not_let_go_early() {
    let trial = Trial::new();
    let qemu = trial.launch().await;
    let (one, two, client) = (trial.client(), trial.client(), trial.client());
    let waiting = async { tokio::join!(one.wait(), two.wait()) };
    let acting = async {
        assert!(client.bye(BOUND).await.is_err());
        assert_eq!(client.status(BOUND).await.unwrap().exit, None);
        client.kill(BOUND).await.unwrap()
    };
    let ((first, second), killed) = tokio::join!(waiting, acting);
    assert_eq!(first.unwrap(), killed);
    assert_eq!(second.unwrap(), killed);
    qemu.exited().await.unwrap();
}
