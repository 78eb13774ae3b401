//! The built `vmferry` against a planner that answers as it is told to.

#![expect(clippy::unwrap_used, reason = "a test that cannot set its scene has failed")]

mod capacity;
mod fake_planner;

use expect_test::expect;
use prost::Message as _;
use tokio::process::Command;
use tonic::{Code, Status};
use vmferry_proto::v1::{
    Blocker, DeleteVmReply, DoctorReply, ErrorDetail, Finding, Host, ListHostsReply, Migration,
    OpenHalf, Stuck, Vm,
};

use fake_planner::{Answers, FakePlanner, StreamEnd};

/// How a run of `vmferry` ended.
struct Ended {
    code: i32,
    stdout: String,
    stderr: String,
}

async fn vmferry(planner: &str, args: &[&str]) -> Ended {
    let output = Command::new(env!("CARGO_BIN_EXE_vmferry"))
        .args(["--config", "/nonexistent/ctl.toml", "--planner", planner])
        .args(args)
        .kill_on_drop(true)
        .output()
        .await
        .unwrap();
    Ended {
        code: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Runs `vmferry` against `answers`; returns the planner too, for what it was asked.
async fn run(answers: Answers, args: &[&str]) -> (Ended, FakePlanner) {
    let planner = FakePlanner::start(answers).await;
    (vmferry(&planner.address(), args).await, planner)
}

fn migration(phase: &str, state: &str) -> Migration {
    Migration {
        id: "m-1".into(),
        vm_id: "u-1".into(),
        vm_name: "web1".into(),
        source_host: "a".into(),
        target_host: "b".into(),
        phase: phase.into(),
        state: state.into(),
        ..Migration::default()
    }
}

fn refusal(code: Code, message: &str, detail: &ErrorDetail) -> Status {
    Status::with_details(code, message, detail.encode_to_vec().into())
}

/// Moves web1 with `--wait` while its migration goes through `states`.
async fn waited(states: Vec<Migration>) -> Ended {
    let answers = Answers { states, ..Answers::default() };
    run(answers, &["vm", "migrate", "web1", "--to", "b", "--wait", "--timeout", "20s"]).await.0
}

#[tokio::test]
async fn a_move_that_is_done_ends_with_0() {
    let done = Migration { pause_us: 42_000, ..migration("done", "completed") };
    let ended = waited(vec![migration("admitted", "syncing"), done]).await;
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    expect![[r#"
        m-1  web1: a -> b  completed (done)  guest paused 42 ms
    "#]]
    .assert_eq(&ended.stdout);
    expect![[r#"
        m-1: admitted
        m-1: done
    "#]]
    .assert_eq(&ended.stderr);
}

#[tokio::test]
async fn a_move_that_was_taken_back_ends_with_5_and_its_cause() {
    let aborted =
        Migration { error: "receiver on b ended: exit 1".into(), ..migration("aborted", "failed") };
    let ended = waited(vec![migration("admitted", "syncing"), aborted]).await;
    assert_eq!(ended.code, 5, "{}", ended.stderr);
    assert!(ended.stderr.contains("rolled back: receiver on b ended: exit 1"), "{}", ended.stderr);
}

#[tokio::test]
async fn a_move_that_failed_ends_with_6() {
    let failed = Migration { error: "guest lost".into(), ..migration("failed", "failed") };
    let ended = waited(vec![failed]).await;
    assert_eq!(ended.code, 6, "{}", ended.stderr);
    assert!(ended.stderr.contains("vmferry migration show m-1"), "{}", ended.stderr);
}

#[tokio::test]
async fn a_move_that_never_found_room_ends_with_3() {
    let phases = ["queued", "aborted"]
        .map(|phase| vmferry_proto::v1::PhaseTime { phase: phase.into(), ..Default::default() });
    let expired = Migration {
        error: "capacity_wait_expired".into(),
        phases: phases.to_vec(),
        ..migration("aborted", "failed")
    };
    let ended = waited(vec![migration("queued", "pending"), expired]).await;
    assert_eq!(ended.code, 3, "{}", ended.stderr);
}

#[tokio::test]
async fn a_wait_that_is_over_ends_with_4_and_says_what_holds_the_work() {
    let stuck = Stuck { cause: "b is silent".into(), waits_for: "agent b".into(), age_ms: 9000 };
    let rolling = Migration { stuck: Some(stuck), ..migration("rolling_back", "switching") };
    let answers = Answers { states: vec![rolling], stream: StreamEnd::Never, ..Answers::default() };
    let args = ["vm", "migrate", "web1", "--wait", "--timeout", "300ms"];
    let (ended, planner) = run(answers, &args).await;
    assert_eq!(ended.code, 4, "{}", ended.stderr);
    assert!(ended.stderr.contains("it goes on: rolling_back, stuck for 9.0 s"), "{}", ended.stderr);
    assert_eq!(planner.asked().cancelled, Vec::<String>::new());
}

#[tokio::test]
async fn a_move_may_be_asked_to_hold_its_guest_still() {
    let answers = || Answers {
        states: vec![Migration {
            method: "snapshot".into(),
            downgraded_from: "precopy".into(),
            downgrade_cause: "the transfer did not reach the switchover".into(),
            ..migration("done", "completed")
        }],
        ..Answers::default()
    };
    let args = ["vm", "migrate", "web1", "--method", "snapshot", "--downgrade", "never"];
    let (_, planner) = run(answers(), &args).await;
    let asked = planner.asked().migrated[0].clone();
    assert_eq!((asked.method.as_str(), asked.downgrade.as_str()), ("snapshot", "never"));
    let (_, planner) = run(answers(), &["vm", "migrate", "web1"]).await;
    let asked = planner.asked().migrated[0].clone();
    assert_eq!((asked.method.as_str(), asked.downgrade.as_str()), ("", ""));
    let (shown, _) = run(answers(), &["migration", "show", "m-1"]).await;
    assert!(shown.stdout.contains("instead of") && shown.stdout.contains("precopy"));
    assert!(shown.stdout.contains("did not reach the switchover"), "{}", shown.stdout);
}

#[tokio::test]
async fn a_stream_that_breaks_is_followed_on() {
    let answers = Answers {
        states: vec![migration("admitted", "syncing"), migration("done", "completed")],
        stream: StreamEnd::AfterEach,
        ..Answers::default()
    };
    let args = ["migration", "watch", "m-1", "--timeout", "20s", "-o", "json"];
    let (ended, planner) = run(answers, &args).await;
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let phases: Vec<String> = ended
        .stdout
        .lines()
        .map(|line| serde_json::from_str::<Migration>(line).unwrap().phase)
        .collect();
    assert_eq!(phases, ["admitted", "done"]);
    assert_eq!(planner.asked().watched, 2);
}

#[tokio::test]
async fn a_planner_that_restarts_after_it_accepted_is_waited_for() {
    let answers = Answers {
        states: vec![migration("done", "completed")],
        stream: StreamEnd::BeforeFirst,
        ..Answers::default()
    };
    let (ended, planner) = run(answers, &["vm", "migrate", "web1", "--to", "b", "--wait"]).await;
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert_eq!(planner.asked().watched, 2);
}

#[tokio::test]
async fn a_refusal_shows_all_reasons_and_ends_with_3() {
    let blocker = |code: &str, message: &str| Blocker {
        code: code.into(),
        message: message.into(),
        host_id: "b".into(),
    };
    let detail = ErrorDetail {
        code: "blocked".into(),
        blockers: vec![
            blocker("missing_bridge", "there is no bridge br0; create it or change the NIC"),
            blocker("memory", "1 GiB is wanted, 512 MiB is free"),
        ],
        ..ErrorDetail::default()
    };
    let refused = || Answers {
        refusal: Some(refusal(Code::FailedPrecondition, "web1 cannot move to b", &detail)),
        ..Answers::default()
    };
    let (ended, _) = run(refused(), &["vm", "migrate", "web1", "--to", "b"]).await;
    assert_eq!((ended.code, ended.stdout.as_str()), (3, ""));
    expect![[r#"
        error: migrate VM web1 to b: web1 cannot move to b
          missing_bridge (host b): there is no bridge br0; create it or change the NIC
          memory (host b): 1 GiB is wanted, 512 MiB is free
        hint: mend what is listed and give the command again; nothing was changed
    "#]]
    .assert_eq(&ended.stderr);

    let (ended, _) = run(refused(), &["vm", "migrate", "web1", "-o", "json"]).await;
    expect![[r#"
        {"code":"blocked","message":"migrate VM web1: web1 cannot move to b","field":"","blockers":[{"code":"missing_bridge","message":"there is no bridge br0; create it or change the NIC","host_id":"b"},{"code":"memory","message":"1 GiB is wanted, 512 MiB is free","host_id":"b"}],"advice":"mend what is listed and give the command again; nothing was changed","exit_code":3}
    "#]].assert_eq(&ended.stderr);
}

#[tokio::test]
async fn a_name_that_is_not_there_ends_with_2() {
    let detail = ErrorDetail { code: "unknown_vm".into(), ..ErrorDetail::default() };
    let status = refusal(Code::NotFound, "no VM is named web9", &detail);
    let answers = Answers { refusal: Some(status), ..Answers::default() };
    let (ended, _) = run(answers, &["vm", "show", "web9"]).await;
    assert_eq!(ended.code, 2);
    expect![[r#"
        error: show VM web9: no VM is named web9
    "#]]
    .assert_eq(&ended.stderr);
}

#[tokio::test]
async fn a_planner_that_is_not_there_is_named_with_what_to_do() {
    let ended = vmferry("http://127.0.0.1:1", &["host", "list"]).await;
    assert_eq!(ended.code, 1);
    let hint = "hint: is vmferry-planner running there?";
    assert!(
        ended.stderr.contains("no answer from the planner at http://127.0.0.1:1"),
        "{}",
        ended.stderr
    );
    assert!(ended.stderr.contains(hint), "{}", ended.stderr);
}

#[tokio::test]
async fn wrong_arguments_end_with_2() {
    for args in [
        &["vm", "migrate"][..],
        &["vm", "migrate", "web1", "--timeout", "5m"],
        &["migration", "list", "--open", "--stuck"],
        &["vm", "start", "/nonexistent/web1.toml"],
    ] {
        let ended = vmferry("http://127.0.0.1:1", args).await;
        assert_eq!(ended.code, 2, "{args:?}: {}", ended.stderr);
    }
    assert_eq!(vmferry("ftp://x", &["host", "list"]).await.code, 2);
}

#[tokio::test]
async fn json_is_the_planners_message() {
    let host = Host { id: "a".into(), free_memory_bytes: 1 << 30, ..Host::default() };
    let answers = Answers { hosts: vec![host.clone()], ..Answers::default() };
    let (ended, _) = run(answers, &["host", "list", "-o", "json"]).await;
    assert_eq!(serde_json::from_str::<ListHostsReply>(&ended.stdout).unwrap().hosts, [host]);
}

#[tokio::test]
async fn a_start_from_a_file_sends_its_text_and_waits_until_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("web1.toml");
    std::fs::write(&file, "name = \"web1\"\n").unwrap();
    let vm = |power: &str| Vm {
        id: "u-1".into(),
        name: "web1".into(),
        power: power.into(),
        ..Vm::default()
    };
    let answers =
        Answers { vms: vec![vm("starting"), vm("starting"), vm("running")], ..Answers::default() };
    let args = ["vm", "start", file.to_str().unwrap(), "--on", "a", "--wait", "-o", "json"];
    let (ended, planner) = run(answers, &args).await;
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let printed: Vm = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(printed.power, "running");
    let started = planner.asked().started;
    let first = started.first().unwrap();
    assert_eq!((first.definition.as_str(), first.host.as_str()), ("name = \"web1\"\n", "a"));
}

#[tokio::test]
async fn a_start_that_failed_shows_the_real_error() {
    let vm = |power: &str, error: &str| Vm {
        id: "u-1".into(),
        name: "web1".into(),
        power: power.into(),
        error: error.into(),
        ..Vm::default()
    };
    let answers = Answers {
        vms: vec![vm("starting", ""), vm("stopped", "disk /x.raw is held by pid 7")],
        ..Answers::default()
    };
    let (ended, _) = run(answers, &["vm", "start", "web1", "--wait"]).await;
    assert_eq!(ended.code, 1);
    assert!(
        ended.stderr.contains("start VM web1: disk /x.raw is held by pid 7"),
        "{}",
        ended.stderr
    );
}

#[tokio::test]
async fn a_move_carries_its_limits_and_a_fresh_request_id() {
    let answers = Answers { states: vec![migration("queued", "pending")], ..Answers::default() };
    let args =
        ["vm", "migrate", "web1", "--to", "b", "--bandwidth", "100", "--downtime-limit", "50ms"];
    let (ended, planner) = run(answers, &args).await;
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let asked = planner.asked().migrated;
    let request = asked.first().unwrap();
    assert_eq!((request.bandwidth_mbps, request.downtime_limit_ms), (100, 50));
    assert_eq!((request.vm_name.as_str(), request.target_host.as_str()), ("web1", "b"));
    assert!(!request.request_id.is_empty());
}

#[tokio::test]
async fn a_move_step_by_step_waits_for_its_gate_and_go_names_the_gate_that_was_seen() {
    let at_gate = Migration {
        waits_at_gate: "start".into(),
        gate_expires: "2026-01-02T03:04:05Z".into(),
        ..migration("admitted", "precheck")
    };
    let answers = Answers { states: vec![at_gate], ..Answers::default() };
    let args = ["vm", "migrate", "web1", "--step-by-step", "--gate-deadline", "5m", "--wait"];
    let (ended, planner) = run(answers.clone(), &args).await;
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert!(ended.stdout.contains("waits at the start gate until"), "{}", ended.stdout);
    let asked = planner.asked().migrated.pop().unwrap();
    assert_eq!(asked.gates, ["start", "switchover", "commit"]);
    assert_eq!(asked.gate_deadline_ms, 300_000);
    let (ended, planner) = run(answers.clone(), &["migration", "go", "m-1"]).await;
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert_eq!(planner.asked().gates, [("m-1".to_owned(), "start".to_owned())]);
    let args = ["vm", "migrate", "web1", "--step-by-step=commit"];
    let (_, planner) = run(answers, &args).await;
    assert_eq!(planner.asked().migrated.pop().unwrap().gates, ["commit"]);
    let answers = Answers { states: vec![migration("done", "completed")], ..Answers::default() };
    let (ended, planner) = run(answers, &["migration", "go", "m-1"]).await;
    assert_eq!((ended.code, planner.asked().gates.len()), (1, 0), "{}", ended.stderr);
}

#[tokio::test]
async fn a_cancel_that_came_too_late_ends_with_3() {
    let answers = Answers { states: vec![migration("done", "completed")], ..Answers::default() };
    let (ended, planner) = run(answers, &["migration", "cancel", "m-1", "--wait"]).await;
    assert_eq!(ended.code, 3);
    assert!(ended.stderr.contains("too late: the guest runs on b"), "{}", ended.stderr);
    assert_eq!(planner.asked().cancelled, ["m-1"]);
}

#[tokio::test]
async fn a_cancel_that_took_it_back_ends_with_0() {
    let answers = Answers { states: vec![migration("aborted", "cancelled")], ..Answers::default() };
    let (ended, _) = run(answers, &["migration", "cancel", "m-1", "--wait"]).await;
    assert_eq!(ended.code, 0, "{}", ended.stderr);
}

#[tokio::test]
async fn completions_need_no_planner() {
    let ended = vmferry("http://127.0.0.1:1", &["completions", "bash"]).await;
    assert_eq!(ended.code, 0);
    assert!(ended.stdout.contains("_vmferry"));
}

#[tokio::test]
async fn a_host_is_not_declared_dead_without_the_word_that_its_power_is_off() {
    let answers = Answers {
        hosts: vec![Host { id: "a".into(), status: "dead".into(), ..Host::default() }],
        ..Answers::default()
    };
    let args = ["host", "declare-dead", "a", "--reason", "rack is dark"];
    let (ended, planner) = run(answers.clone(), &args).await;
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert!(ended.stderr.contains("--i-have-powered-it-off is missing"), "{}", ended.stderr);
    assert!(ended.stderr.contains("run twice"), "{}", ended.stderr);
    assert_eq!(planner.asked().declared.len(), 0);
    let args = ["host", "declare-dead", "a", "--i-have-powered-it-off", "--reason", "rack is dark"];
    let (ended, planner) = run(answers, &args).await;
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert!(ended.stdout.contains("host a is declared dead"), "{}", ended.stdout);
    let declared = planner.asked().declared;
    assert_eq!(declared[0].confirmation, "i-have-powered-it-off");
    assert_eq!(declared[0].reason, "rack is dark");
    assert!(!declared[0].by.is_empty());
}

#[tokio::test]
async fn a_doctor_that_finds_something_ends_with_6() {
    let well = DoctorReply { well: true, ..DoctorReply::default() };
    let (ended, _) = run(Answers { doctor: well, ..Answers::default() }, &["doctor"]).await;
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let finding = Finding {
        severity: "error".into(),
        code: "runs_twice".into(),
        message: "VM web1 runs on host a and host b".into(),
        ..Finding::default()
    };
    let ill = DoctorReply { findings: vec![finding], ..DoctorReply::default() };
    let answers = Answers { doctor: ill.clone(), ..Answers::default() };
    let (ended, _) = run(answers.clone(), &["doctor"]).await;
    assert_eq!(ended.code, 6, "{}", ended.stderr);
    assert!(ended.stdout.contains("error runs_twice: VM web1 runs on"), "{}", ended.stdout);
    let (ended, _) = run(answers, &["doctor", "web1", "-o", "json"]).await;
    assert_eq!(ended.code, 6);
    assert_eq!(serde_json::from_str::<DoctorReply>(&ended.stdout).unwrap(), ill);
}

#[tokio::test]
async fn a_side_is_kept_only_by_whoever_has_looked() {
    let half = OpenHalf {
        migration_id: "m-1".into(),
        vm_name: "web1".into(),
        host: "b".into(),
        side: "destination".into(),
        run_state: "paused".into(),
        words: "a receiver for web1 waits on host b".into(),
        ..OpenHalf::default()
    };
    let answers = Answers {
        halves: vec![half],
        states: vec![migration("resolved", "completed")],
        ..Answers::default()
    };
    let (ended, _) = run(answers.clone(), &["migration", "list"]).await;
    assert!(ended.stdout.contains("open halves"), "{}", ended.stdout);
    assert!(ended.stdout.contains("a receiver for web1 waits on host b"), "{}", ended.stdout);
    let args = ["migration", "resolve", "m-1", "--keep", "destination"];
    let (ended, planner) = run(answers.clone(), &args).await;
    assert_eq!(ended.code, 2, "{}", ended.stderr);
    assert_eq!(planner.asked().resolved.len(), 0);
    let args = ["migration", "resolve", "m-1", "--keep", "destination", "--i-have-checked"];
    let (ended, planner) = run(answers, &args).await;
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let asked = planner.asked().resolved;
    assert_eq!(
        (asked[0].keep.as_str(), asked[0].confirmation.as_str()),
        ("destination", "i-have-checked")
    );
}

#[tokio::test]
async fn what_is_left_of_a_deleted_vm_is_told() {
    let left =
        DeleteVmReply { left: "host a may still have it".into(), ..DeleteVmReply::default() };
    let (ended, _) =
        run(Answers { deleted: left, ..Answers::default() }, &["vm", "delete", "web1"]).await;
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    expect![[r#"
        web1 is deleted; its disks are where they were
        host a may still have it
    "#]]
    .assert_eq(&ended.stdout);
}
