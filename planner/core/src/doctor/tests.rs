use vmferry_types::{Claim, Generation, PowerState, Role, Timestamp};

use super::*;
use crate::evidence::{Continued, Handed, Knowledge, RunState};

const NOW: Timestamp = Timestamp(1_000_000);
const WEB: VmId = VmId::from_u128(1);
const MOVE: MigrationId = MigrationId::from_u128(9);

fn host(name: &str) -> HostId {
    name.parse().unwrap()
}

fn generation(number: u64) -> Generation {
    Generation::from_stored(number)
}

fn there(role: Role, run_state: RunState) -> Remains {
    Remains {
        vm: WEB,
        name: "web1".to_owned(),
        role,
        knowledge: Knowledge::Known,
        process: Process::Alive,
        run_state,
        generation: generation(2),
        claim: Claim::from_stored(5),
        migration: Some(MOVE),
        handed: Handed::No,
        gave_up: GaveUp::No,
        continued: if role == Role::Running { Continued::Yes } else { Continued::No },
    }
}

fn runs() -> Remains {
    there(Role::Running, RunState::Running)
}

fn said(name: &str, vms: Vec<Remains>) -> HostSaid {
    HostSaid {
        id: host(name),
        answer: Answer::Whole,
        boot_id: "boot".to_owned(),
        declared: None,
        vms,
        strangers: Vec::new(),
        orphans: Vec::new(),
    }
}

fn silent(name: &str) -> HostSaid {
    let answer = Answer::Silent {
        reason: "no route".to_owned(),
        heard: Some(Timestamp(NOW.value() - 9000)),
    };
    HostSaid { answer, ..said(name, Vec::new()) }
}

fn declared(standing: Standing) -> Option<Declared> {
    let (by, reason) = ("ann".to_owned(), "rack is dark".to_owned());
    Some(Declared { at: Timestamp(NOW.value() - 60_000), by, reason, standing })
}

fn known(power: PowerState) -> Known {
    Known {
        id: WEB,
        name: "web1".to_owned(),
        host: Some(host("a")),
        power,
        generation: generation(2),
        claim: Claim::from_stored(5),
        under: Under::Nothing,
        error: String::new(),
    }
}

fn ended(ago_ms: u64) -> Move {
    let ended = Some(Timestamp(NOW.value() - ago_ms));
    Move { id: MOVE, vm: WEB, ended, stuck: None, undecided: false }
}

fn open() -> Move {
    Move { ended: None, ..ended(0) }
}

fn picture(hosts: Vec<HostSaid>) -> Picture {
    let vms = vec![known(PowerState::Running)];
    Picture { now: NOW, hosts, vms, moves: vec![ended(60_000)], queue: Vec::new() }
}

/// Says who runs the VM and what was found, as `severity:code@host`.
fn check(picture: &Picture) -> (String, Vec<String>) {
    let diagnosis = examine(picture);
    let runner = match &diagnosis.runners[..] {
        [(_, Runner::One(host))] => host.to_string(),
        [(_, other)] => other.label().to_owned(),
        _ => String::new(),
    };
    let found = diagnosis
        .findings
        .iter()
        .map(|found| {
            let at = found.host.as_ref().map(|host| format!("@{host}")).unwrap_or_default();
            format!("{}:{}{at}", found.severity.label(), found.code)
        })
        .collect();
    (runner, found)
}

#[track_caller]
fn expect(picture: &Picture, runner: &str, found: &[&str]) {
    let (by, all) = check(picture);
    assert_eq!(
        (by.as_str(), all.iter().map(String::as_str).collect::<Vec<_>>()),
        (runner, found.to_vec())
    );
}

#[test]
fn a_vm_that_runs_where_the_store_has_it_is_well() {
    let well = picture(vec![said("a", vec![runs()]), said("b", Vec::new())]);
    expect(&well, "a", &[]);
    assert!(examine(&well).is_well());
}

#[test]
fn a_vm_that_runs_twice_is_named_with_both_hosts() {
    let twice = picture(vec![said("a", vec![runs()]), said("b", vec![runs()])]);
    expect(&twice, "several", &["error:runs_twice"]);
    assert!(examine(&twice).findings[0].message.contains("host a and host b"));
    // Also while it moves: nothing excuses it.
    let mut moving = twice;
    moving.vms[0].under = Under::Migration(MOVE);
    moving.moves = vec![open()];
    expect(&moving, "several", &["error:runs_twice"]);
}

#[test]
fn a_vm_that_runs_elsewhere_or_though_it_should_not_contradicts() {
    let elsewhere = picture(vec![said("a", Vec::new()), said("b", vec![runs()])]);
    expect(&elsewhere, "b", &["error:runs_elsewhere@b"]);
    let mut stopped = picture(vec![said("a", vec![runs()])]);
    stopped.vms = vec![known(PowerState::Stopped)];
    expect(&stopped, "a", &["error:runs_though_not@a"]);
    let mut newer = picture(vec![said("a", vec![Remains { generation: generation(3), ..runs() }])]);
    expect(&newer, "a", &["error:newer_generation@a"]);
    newer.vms[0].under = Under::Migration(MOVE);
    newer.moves = vec![open()];
    expect(&newer, "a", &[]);
}

#[test]
fn what_should_run_and_does_not_is_told_by_how_it_is_known() {
    let gone = Remains { process: Process::Gone("signal 9".to_owned()), ..runs() };
    expect(&picture(vec![said("a", vec![gone])]), "none", &["error:gone@a"]);
    expect(&picture(vec![said("a", Vec::new())]), "none", &["error:missing@a"]);
    let absent = Remains { process: Process::None, ..there(Role::Absent, RunState::Unknown) };
    expect(&picture(vec![said("a", vec![absent])]), "none", &["error:missing@a"]);
    expect(&picture(Vec::new()), "unknown", &["error:host_unknown@a"]);
    let paused = there(Role::Running, RunState::Paused);
    expect(&picture(vec![said("a", vec![paused])]), "a", &["warning:stands_still@a"]);
    let mut nowhere = picture(vec![said("a", Vec::new())]);
    nowhere.vms = vec![Known { host: None, ..known(PowerState::Running) }];
    expect(&nowhere, "none", &["error:no_host"]);
    let mut lost = picture(vec![said("a", Vec::new())]);
    lost.vms = vec![known(PowerState::Lost)];
    expect(&lost, "none", &["error:lost"]);
}

#[test]
fn silence_is_not_absence() {
    expect(&picture(vec![silent("a")]), "unknown", &["error:host_silent@a"]);
    let learning = HostSaid { answer: Answer::Learning, ..said("a", Vec::new()) };
    expect(&picture(vec![learning]), "unknown", &["warning:learning@a"]);
    let lost_journal = HostSaid { answer: Answer::Unreadable, ..said("a", Vec::new()) };
    expect(&picture(vec![lost_journal]), "unknown", &["warning:journal_unreadable@a"]);
    // One that owns nothing is missed less.
    let both = picture(vec![said("a", vec![runs()]), silent("b")]);
    expect(&both, "a", &["warning:host_silent@b"]);
    assert!(examine(&both).is_well());
}

#[test]
fn a_death_is_proof_until_the_host_answers_from_the_same_boot() {
    let mut dead = picture(vec![HostSaid { declared: declared(Standing::Holds), ..silent("a") }]);
    dead.vms = vec![known(PowerState::Stopped)];
    expect(&dead, "none", &["note:host_dead@a"]);
    let void = declared(Standing::Void { at: NOW });
    let back = HostSaid { declared: void.clone(), ..said("a", vec![runs()]) };
    expect(&picture(vec![back.clone()]), "a", &["warning:death_contradicted@a"]);
    let mut moved_on = picture(vec![back, said("b", vec![runs()])]);
    moved_on.vms[0].host = Some(host("b"));
    expect(&moved_on, "several", &["error:death_contradicted@a", "error:runs_twice"]);
    let rebooted = HostSaid { declared: declared(Standing::History), ..said("a", vec![runs()]) };
    expect(&picture(vec![rebooted]), "a", &[]);
}

#[test]
fn both_halves_of_a_move_that_the_store_does_not_know_are_shown() {
    let source = Remains { handed: Handed::Yes, ..there(Role::Running, RunState::PostMigrate) };
    let receiver = there(Role::Receiver, RunState::Paused);
    let mut halves =
        picture(vec![said("a", vec![source.clone()]), said("b", vec![receiver.clone()])]);
    halves.moves.clear();
    let found = open_halves(&halves);
    let sides: Vec<_> = found.iter().map(|half| (half.side.label(), half.host.as_str())).collect();
    assert_eq!(sides, [("source", "a"), ("destination", "b")]);
    expect(&halves, "none", &["error:open_half@a", "error:open_half@b", "warning:stands_still@a"]);
    // As long as a row drives it, or has only just ended, it is nobody's business.
    for moves in [vec![open()], vec![ended(2000)]] {
        halves.moves = moves;
        assert_eq!(open_halves(&halves), Vec::new());
    }
    // A source that is still sending shows by its receiver; one that runs on by itself does not.
    let sending = picture(vec![said("a", vec![runs()]), said("b", vec![receiver.clone()])]);
    let words =
        |picture: &Picture| open_halves(picture).iter().map(OpenHalf::words).collect::<Vec<_>>();
    assert_eq!(
        words(&sending),
        ["web1 is being sent from host a", "a receiver for web1 waits on host b"]
    );
    let back = Remains { gave_up: GaveUp::Yes, ..runs() };
    let back = picture(vec![said("a", vec![back]), said("b", vec![receiver])]);
    assert!(words(&back)[0].contains("which took that back"), "{:?}", words(&back));
    assert_eq!(open_halves(&picture(vec![said("a", vec![runs()])])), Vec::new());
}

#[test]
fn what_nobody_owns_is_named() {
    let orphan = Orphan {
        vm: Some(VmId::from_u128(7)),
        name: "old".to_owned(),
        kind: "definition".to_owned(),
        detail: "/var/lib/vmferry/old.toml".to_owned(),
    };
    let mut all = picture(vec![HostSaid {
        strangers: vec!["pid 7 someone's".to_owned(), format!("pid 8 web1 {WEB}")],
        orphans: vec![orphan],
        ..said("a", vec![runs()])
    }]);
    expect(&all, "a", &["error:stranger_is_vm@a", "warning:orphan@a", "note:stranger@a"]);
    all.vms.clear();
    all.hosts[0].strangers.clear();
    let (_, found) = check(&all);
    assert_eq!(found, ["error:unknown_vm@a", "warning:orphan@a"]);
}

#[test]
fn migrations_that_wait_for_somebody_are_named() {
    let mut waiting = picture(vec![said("a", vec![runs()])]);
    waiting.vms[0].under = Under::Migration(MOVE);
    let stuck = Some(("no route".to_owned(), "the destination agent to answer".to_owned()));
    waiting.moves = vec![Move { stuck: stuck.clone(), ..open() }];
    expect(&waiting, "a", &["error:stuck"]);
    waiting.moves = vec![Move { stuck, undecided: true, ..open() }];
    expect(&waiting, "a", &["error:undecided"]);
    waiting.moves = vec![open()];
    expect(&waiting, "a", &[]);
}

#[test]
fn a_start_that_waits_is_said_to_wait_and_hides_nothing_that_contradicts() {
    let waits = Waits {
        id: MOVE,
        vm: WEB,
        what: "start",
        words: "since 10:02: 2 of 3 in the queue, for 1 min, given up in 118 min: full".to_owned(),
    };
    let mut queued = picture(vec![said("a", Vec::new())]);
    queued.vms = vec![Known { under: Under::Queued(MOVE), ..known(PowerState::Stopped) }];
    queued.queue = vec![waits];
    expect(&queued, "none", &["note:waits_for_room"]);
    let told = examine(&queued);
    assert!(told.is_well());
    assert_eq!(
        told.findings[0].message,
        "the start of VM web1 waits: since 10:02: 2 of 3 in the queue, for 1 min, given up in 118 \
         min: full"
    );
    queued.hosts = vec![said("a", vec![runs()])];
    expect(&queued, "a", &["error:runs_though_not@a", "note:waits_for_room"]);
    // One that is lost and waits to be started again needs nobody.
    queued.hosts = vec![said("a", Vec::new())];
    queued.vms[0].power = PowerState::Lost;
    expect(&queued, "none", &["note:waits_for_room"]);
}
