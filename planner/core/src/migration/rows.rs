//! One row of every kind, for tests.

use vmferry_types::{
    BytesPerSec, Claim, Generation, HostId, Method, MigrationId, Millis, Role, Timestamp, VmId,
};

use super::{
    AutoConverge, Back, Blocked, Cause, Cleanup, Downgrade, Downgraded, Event, Gates, GoneProof,
    Guest, Handover, Keep, Limits, Listener, Migration, NotConverging, Opening, Phase, Process,
    ProofKind, Ran, Receiver, SourceWord, Stage, Stood, Switchover, Takes, Terms, Word,
};
use crate::evidence::{
    Continued, Ended, Handed, Heard, Held, Knowledge, Ready, RunState, Seen, Shutdown, Sides,
    Times, TransferState,
};

pub(crate) const ID: MigrationId = MigrationId::from_u128(1);
pub(crate) const CLAIM: Claim = Claim::from_stored(7);
pub(crate) const GENERATION: Generation = Generation::from_stored(3);
pub(crate) const DEADLINE: Timestamp = Timestamp(7_200_000);

pub(crate) fn host(id: &str) -> HostId {
    id.parse().unwrap()
}

pub(crate) fn terms() -> Terms {
    Terms {
        asked_destination: None,
        hold_limit: Millis(10_000),
        downtime_limit: Millis(100),
        transfer_timeout: Millis(3_600_000),
        stall_limit: Millis(30_000),
        switchover_limit: Millis(30_000),
        shutdown_limit: Millis(120_000),
        max_bandwidth: BytesPerSec(0),
        auto_converge: AutoConverge::Off,
        gates: Gates::OPEN,
        gate_deadline: Millis(30_000),
        downgrade: Downgrade::Never,
        not_converging: NotConverging::Abort,
    }
}

/// Terms under which a live move that is refused goes on as a held one.
pub(crate) fn lenient() -> Terms {
    Terms { downgrade: Downgrade::Snapshot, ..terms() }
}

pub(crate) fn opening() -> Opening {
    Opening {
        id: ID,
        vm: VmId::from_u128(2),
        source: host("a"),
        method: Method::Precopy,
        terms: terms(),
        found: Guest::Present,
        generation: GENERATION,
        deadline: DEADLINE,
    }
}

pub(crate) fn queued() -> Migration {
    Migration::open(opening()).unwrap()
}

pub(crate) fn in_phase(phase: Phase) -> Migration {
    Migration { phase, ..queued() }
}

pub(crate) fn waiting() -> Migration {
    let blocked = Blocked { since: Timestamp(5), note: "full".into() };
    in_phase(Phase::Queued { blocked: Some(blocked), deadline: DEADLINE })
}

pub(crate) fn arming() -> Migration {
    in_phase(Phase::Admitted { destination: host("b"), stage: Stage::Arming })
}

pub(crate) fn listener() -> Listener {
    Listener::new("10.0.0.2".into(), 49_152)
}

pub(crate) fn transferring() -> Migration {
    let stage = Stage::Transferring { listener: listener() };
    in_phase(Phase::Admitted { destination: host("b"), stage })
}

/// Its receiver listens, and nobody has said yet that it may be sent anything.
pub(crate) fn at_start_gate() -> Migration {
    let stage = Stage::Waiting { listener: listener() };
    gated(in_phase(Phase::Admitted { destination: host("b"), stage }))
}

/// The same row, waiting wherever that is possible.
pub(crate) fn gated(row: Migration) -> Migration {
    Migration { terms: Terms { gates: Gates::CLOSED, ..row.terms }, ..row }
}

/// The same row, of a guest that goes before its memory.
pub(crate) fn postcopy(row: Migration) -> Migration {
    Migration { method: Method::Postcopy, ..row }
}

/// A receiver that can take a guest whose memory follows.
pub(crate) fn listener_post() -> Listener {
    Listener { takes: Takes::Preempt, ..listener() }
}

pub(crate) fn parting() -> Migration {
    let stage = Stage::Parting { listener: listener_post() };
    postcopy(in_phase(Phase::Admitted { destination: host("b"), stage }))
}

fn word_divided(run_state: RunState) -> Word {
    Word { transfer: TransferState::PostcopyActive, ..word(run_state) }
}

pub(crate) fn handover_divided() -> Handover {
    Handover {
        source: SourceWord::Serves(word_divided(RunState::FinishMigrate)),
        destination: word_divided(RunState::Paused),
    }
}

pub(crate) fn restored_divided() -> Migration {
    postcopy(restored(handover_divided()))
}

pub(crate) fn attached_divided() -> Migration {
    let (destination, generation) = (host("b"), GENERATION.next());
    let proof = handover_divided();
    postcopy(in_phase(Phase::Attached { destination, proof, generation, guest: Guest::Present }))
}

pub(crate) fn severed(cleanup: Cleanup) -> Migration {
    postcopy(in_phase(Phase::Failed {
        destination: host("b"),
        owner: host("a"),
        generation: GENERATION,
        cause: Cause::Severed { error: "QEMU on host b is gone".into() },
        first: None,
        cleanup,
    }))
}

/// The same, once ownership had moved.
pub(crate) fn severed_later() -> Migration {
    let mut row = severed(Cleanup::Source);
    if let Phase::Failed { owner, generation, .. } = &mut row.phase {
        (*owner, *generation) = (host("b"), GENERATION.next());
    }
    row
}

fn refused() -> Cause {
    Cause::GaveUp { error: "no byte crossed".into() }
}

pub(crate) fn recalling() -> Migration {
    let stage = Stage::Recalling { cause: refused() };
    Migration { terms: lenient(), ..in_phase(Phase::Admitted { destination: host("b"), stage }) }
}

pub(crate) fn clearing_live() -> Migration {
    let stage = Stage::Clearing { cause: refused() };
    Migration { terms: lenient(), ..in_phase(Phase::Admitted { destination: host("b"), stage }) }
}

/// The receiver of the live attempt that was refused.
pub(crate) fn gone_before() -> GoneProof {
    GoneProof { pid: 99, start_time: 4, ..gone("b") }
}

/// Turned to a held move, in the same row.
fn downgraded(phase: Phase) -> Migration {
    let before = Downgraded { from: Method::Precopy, cause: refused(), receiver: gone_before() };
    Migration {
        method: Method::Snapshot,
        downgraded: Some(before),
        terms: lenient(),
        ..in_phase(phase)
    }
}

pub(crate) fn arming_again() -> Migration {
    downgraded(Phase::Admitted { destination: host("b"), stage: Stage::Arming })
}

pub(crate) fn holding() -> Migration {
    let stage = Stage::Holding { listener: listener() };
    downgraded(Phase::Admitted { destination: host("b"), stage })
}

pub(crate) fn held() -> Migration {
    let switchover = Switchover::Held { listener: listener() };
    downgraded(Phase::Captured { destination: host("b"), switchover })
}

pub(crate) fn captured(switchover: Switchover) -> Migration {
    in_phase(Phase::Captured { destination: host("b"), switchover })
}

pub(crate) fn gone(at: &str) -> GoneProof {
    GoneProof {
        kind: ProofKind::ExitRecord,
        host: host(at),
        boot_id: "boot".into(),
        pid: 100,
        start_time: 5,
        ended: "signal 9".into(),
        at: Timestamp(1_000),
        stderr_tail: String::new(),
    }
}

pub(crate) fn process() -> Process {
    Process { pid: 100, start_time: 5, boot_id: "boot".into() }
}

fn word(run_state: RunState) -> Word {
    let (transfer, at) = (TransferState::Completed, Timestamp(900));
    Word { process: process(), transfer, run_state, at }
}

pub(crate) fn handover() -> Handover {
    Handover {
        source: SourceWord::Completed(word(RunState::PostMigrate)),
        destination: word(RunState::Paused),
    }
}

pub(crate) fn handover_alone() -> Handover {
    Handover { source: SourceWord::Gone(gone("a")), destination: word(RunState::Paused) }
}

pub(crate) fn restored(proof: Handover) -> Migration {
    in_phase(Phase::Restored { destination: host("b"), proof })
}

pub(crate) fn committed(proof: Handover) -> Migration {
    let (destination, generation) = (host("b"), GENERATION.next());
    in_phase(Phase::Committed { destination, proof, generation })
}

pub(crate) fn attached(guest: Guest) -> Migration {
    in_phase(Phase::Attached {
        destination: host("b"),
        proof: handover(),
        generation: GENERATION.next(),
        guest,
    })
}

pub(crate) fn done() -> Migration {
    in_phase(Phase::Done {
        destination: host("b"),
        proof: handover(),
        generation: GENERATION.next(),
        guest: Guest::Present,
        released: gone("a"),
    })
}

pub(crate) fn rolling_back(back: Back) -> Migration {
    in_phase(Phase::RollingBack {
        destination: host("b"),
        generation: GENERATION,
        cause: Cause::Cancelled,
        back,
    })
}

pub(crate) fn aborted(cause: Cause) -> Migration {
    in_phase(Phase::Aborted {
        destination: Some(host("b")),
        generation: GENERATION,
        cause,
        guest: Guest::Present,
    })
}

pub(crate) fn failed(cleanup: Cleanup) -> Migration {
    in_phase(Phase::Failed {
        destination: host("b"),
        owner: host("a"),
        generation: GENERATION,
        cause: Cause::GuestLost { proof: gone("a") },
        first: None,
        cleanup,
    })
}

/// Every kind of row, under the name that the table prints.
pub(crate) fn all() -> Vec<(&'static str, Migration)> {
    vec![
        ("queued", waiting()),
        ("arming", arming()),
        ("at the gate", at_start_gate()),
        ("transferring", transferring()),
        ("transferring +", Migration { terms: lenient(), ..transferring() }),
        ("transferring p", postcopy(transferring())),
        ("parting", parting()),
        ("recalling", recalling()),
        ("clearing live", clearing_live()),
        ("arming again", arming_again()),
        ("holding", holding()),
        ("held", held()),
        ("withheld", gated(captured(Switchover::Withheld))),
        ("ordered", captured(Switchover::Ordered)),
        ("ordered post", postcopy(captured(Switchover::Ordered))),
        ("forward", captured(Switchover::Forward)),
        ("restored", restored(handover())),
        ("restored gate", gated(restored(handover()))),
        ("alone gate", gated(restored(handover_alone()))),
        ("restored alone", restored(handover_alone())),
        ("restored post", postcopy(restored(handover()))),
        ("restored div.", restored_divided()),
        ("committed", committed(handover())),
        ("committed alone", committed(handover_alone())),
        ("committed div.", postcopy(committed(handover_divided()))),
        ("attached", attached(Guest::Present)),
        ("attached off", attached(Guest::PoweredOff)),
        ("attached div.", attached_divided()),
        ("done", done()),
        ("cancelling", rolling_back(Back::Cancelling)),
        ("clearing", rolling_back(Back::Clearing)),
        ("undoing", rolling_back(Back::Undoing)),
        ("resuming", rolling_back(Back::Resuming { gone: gone("b") })),
        ("powered off", rolling_back(Back::PoweredOff)),
        ("aborted", aborted(Cause::Cancelled)),
        ("failed", failed(Cleanup::Nothing)),
        ("failed +receiver", failed(Cleanup::Receiver)),
        ("failed +source", failed(Cleanup::Source)),
        ("failed +half", postcopy(failed(Cleanup::Half))),
        ("failed +human", failed(Cleanup::Undecided)),
        ("severed +rcv", severed(Cleanup::Receiver)),
        ("severed +src", severed(Cleanup::Source)),
        ("severed later", severed_later()),
    ]
}

/// The same row, of a guest that is shut down for its move.
fn cold(row: Migration) -> Migration {
    Migration { method: Method::Cold, ..row }
}

/// The same, of a VM that was off before.
fn off(row: Migration) -> Migration {
    Migration { found: Guest::PoweredOff, ..cold(row) }
}

pub(crate) fn handover_down() -> Handover {
    let word = Word { transfer: TransferState::None, ..word(RunState::Prelaunch) };
    Handover { source: SourceWord::ShutDown(gone("a")), destination: word }
}

/// Every kind of row of a guest that is shut down, or was off.
pub(crate) fn all_cold() -> Vec<(&'static str, Migration)> {
    let shutting_down =
        || in_phase(Phase::Admitted { destination: host("b"), stage: Stage::ShuttingDown });
    let down = || captured(Switchover::Down { source: gone("a") });
    let resuming = || rolling_back(Back::Resuming { gone: gone("b") });
    vec![
        ("queued", cold(waiting())),
        ("shutting down", cold(shutting_down())),
        ("down", cold(down())),
        ("restored", cold(restored(handover_down()))),
        ("committed", cold(committed(handover_down()))),
        ("attached", cold(attached(Guest::Present))),
        ("cancelling", cold(rolling_back(Back::Cancelling))),
        ("clearing", cold(rolling_back(Back::Clearing))),
        ("undoing", cold(rolling_back(Back::Undoing))),
        ("resuming", cold(resuming())),
        ("powered off", cold(rolling_back(Back::PoweredOff))),
        ("off queued", off(waiting())),
        ("off asked", off(shutting_down())),
        ("off down", off(down())),
        ("off restored", off(restored(handover_down()))),
        ("off committed", off(committed(handover_down()))),
        ("off attached", off(attached(Guest::PoweredOff))),
        ("off undoing", off(rolling_back(Back::Undoing))),
    ]
}

/// Every kind of event that happens to such rows, and the first of those that do not.
pub(crate) fn events_cold() -> Vec<(&'static str, Event)> {
    let mut found = events();
    found.retain(|(name, _)| *name != "both");
    found.extend([
        ("both down", Event::BothComplete { proof: handover_down() }),
        ("shut down", Event::SourceShutDown { proof: gone("a") }),
        ("will not", Event::ShutdownRefused),
    ]);
    found
}

/// Every kind of event, under the name that the table prints.
pub(crate) fn events() -> Vec<(&'static str, Event)> {
    let error = || "broken pipe".to_owned();
    vec![
        ("granted", Event::Granted { destination: host("b") }),
        ("no room", Event::NoRoom { at: Timestamp(9), note: "still full".into() }),
        ("expired", Event::QueueExpired),
        ("refused", Event::Refused { blockers: vec![] }),
        ("cancel", Event::CancelRequested),
        ("armed", Event::ReceiverArmed { listener: listener() }),
        ("held", Event::SourceHeld),
        ("stopped", Event::SourceStopped),
        ("sw allowed", Event::SwitchoverAllowed),
        ("commit", Event::CommitAllowed),
        ("both", Event::BothComplete { proof: handover() }),
        ("gave up", Event::SourceGaveUp { error: error(), stood: Stood::No }),
        ("xfer failed", Event::TransferFailed { error: error(), stood: Stood::No }),
        ("runs again", Event::SourceRunsAgain { error: error() }),
        ("timed out", Event::TransferTimedOut),
        ("dec. back", Event::DecidedBack),
        ("dec. fwd", Event::DecidedForward),
        ("src gone+", source_gone(Receiver::Complete(handover_alone()))),
        ("src gone-", source_gone(Receiver::Incomplete)),
        ("guest off", Event::GuestPoweredOff { proof: gone("a") }),
        ("rcv gone", Event::ReceiverGone { proof: gone("b"), ran: Ran::Never }),
        ("rcv gone?", Event::ReceiverGone { proof: gone("b"), ran: Ran::Maybe }),
        ("dst runs", Event::DestinationRuns),
        ("released", Event::SourceReleased { proof: gone("a") }),
        ("src runs", Event::SourceContinued),
        ("due", Event::PostcopyDue { verdict: None }),
        ("diverges", Event::PostcopyDue { verdict: Some("too fast".into()) }),
        ("severed", Event::Severed { error: error() }),
        ("broke", Event::ChannelBroke),
        ("mended", Event::ChannelMended),
        ("start", Event::StartAllowed),
        ("all open", Event::GatesOpened),
        ("gate late", Event::GateExpired),
        ("too fast", Event::Diverges { verdict: "too fast".into() }),
        ("limits", Event::LimitsSet { limits: limits() }),
        ("keep src", Event::Resolved { keep: Keep::Source }),
        ("keep none", Event::Resolved { keep: Keep::Neither }),
    ]
}

fn limits() -> Limits {
    Limits { max_bandwidth: BytesPerSec(1), downtime_limit: Millis(200) }
}

pub(crate) fn source_gone(receiver: Receiver) -> Event {
    Event::SourceGone { proof: gone("a"), receiver }
}

/// What the source's agent says while memory crosses.
pub(crate) fn source_seen() -> Seen {
    Seen {
        host: host("a"),
        claim: CLAIM,
        heard: Heard::Now,
        knowledge: Knowledge::Known,
        role: Role::Running,
        generation: GENERATION,
        migration: Some(ID),
        process: Some(process()),
        gone: None,
        ended: Ended::Unsaid,
        run_state: RunState::Running,
        transfer: TransferState::Active,
        transfer_error: String::new(),
        passes: 1,
        diverges: String::new(),
        tuning: None,
        waits_at: None,
        handed: Handed::No,
        gave_up: None,
        held: Held::No,
        shutdown: Shutdown::Unasked,
        ready: Ready::No,
        continued: Continued::Yes,
        stopped_at_us: 0,
        resumed_at_us: 0,
        still: Millis::ZERO,
        trouble: String::new(),
        at: Timestamp(900),
    }
}

/// What the source's agent says of a guest that is held, before anything is sent.
pub(crate) fn source_held() -> Seen {
    Seen {
        role: Role::Held,
        held: Held::Yes,
        run_state: RunState::Paused,
        transfer: TransferState::None,
        stopped_at_us: 5,
        ..source_seen()
    }
}

/// What the destination's agent says while memory crosses.
pub(crate) fn destination_seen() -> Seen {
    Seen {
        host: host("b"),
        role: Role::Receiver,
        run_state: RunState::InMigrate,
        continued: Continued::No,
        ..source_seen()
    }
}

/// A source that has sent everything.
pub(crate) fn source_sent() -> Seen {
    Seen {
        run_state: RunState::PostMigrate,
        transfer: TransferState::Completed,
        handed: Handed::Yes,
        stopped_at_us: 5,
        ..source_seen()
    }
}

/// A destination that has everything.
pub(crate) fn destination_full() -> Seen {
    Seen { run_state: RunState::Paused, transfer: TransferState::Completed, ..destination_seen() }
}

/// A side whose QEMU is proven gone.
pub(crate) fn dead(seen: Seen) -> Seen {
    let proof = gone(seen.host.as_str());
    Seen {
        process: None,
        gone: Some(proof),
        run_state: RunState::Unknown,
        transfer: TransferState::None,
        ..seen
    }
}

pub(crate) fn sides(source: Seen, destination: Seen) -> Sides {
    Sides { claim: CLAIM, source: Some(source), destination: Some(destination) }
}

/// Soon after the phase was entered.
pub(crate) const SOON: Times = Times { now: Timestamp(1_000), entered: Timestamp(900) };

/// Past the limit of a switchover.
pub(crate) const LATE: Times = Times { now: Timestamp(40_000), entered: Timestamp(900) };
