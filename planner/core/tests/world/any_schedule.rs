//! Random accidents, and what must hold after each. `PROPTEST_CASES` asks for more of them.

use proptest::prelude::*;
use vmferry_planner_core::evidence::{Continued, Held};
use vmferry_planner_core::migration::check::{check_step, replay};
use vmferry_planner_core::migration::{Downgrade, Event, Gate, Gates, Side};
use vmferry_types::{Method, PhaseLabel};

use crate::model::{Agent, Channel, Life, Monitor};
use crate::planner::{Luck, World};

/// One thing that can happen.
#[derive(Clone, Debug)]
enum Happening {
    Turn,
    Drive(Luck),
    Observe(Side),
    Progress,
    SourceNotices,
    DestinationNotices,
    HoldLimit,
    PlannerDies,
    Cut,
    Mends,
    Stall,
    Resumed,
    Kill(Side),
    AgentTurns(Side),
    MonitorTurns,
    Arrives(usize),
    TimePasses(u64),
    Cancel,
    GatesOpen,
}

fn side() -> impl Strategy<Value = Side> {
    prop_oneof![Just(Side::Source), Just(Side::Destination)]
}

fn happening() -> impl Strategy<Value = Happening> {
    let luck = prop_oneof![6 => Just(Luck::Answered), 1 => Just(Luck::AnswerLost), 1 => Just(Luck::Delayed)];
    prop_oneof![
        4 => Just(Happening::Turn),
        30 => luck.prop_map(Happening::Drive),
        30 => side().prop_map(Happening::Observe),
        16 => Just(Happening::Progress),
        4 => Just(Happening::SourceNotices),
        4 => Just(Happening::DestinationNotices),
        1 => Just(Happening::HoldLimit),
        2 => Just(Happening::PlannerDies),
        1 => Just(Happening::Cut),
        2 => Just(Happening::Mends),
        2 => Just(Happening::Stall),
        1 => Just(Happening::Resumed),
        1 => side().prop_map(Happening::Kill),
        2 => side().prop_map(Happening::AgentTurns),
        1 => Just(Happening::MonitorTurns),
        3 => (0usize..3).prop_map(Happening::Arrives),
        3 => (1u64..60_000).prop_map(Happening::TimePasses),
        1 => Just(Happening::Cancel),
        3 => Just(Happening::GatesOpen),
    ]
}

fn happen(world: &mut World, happening: &Happening) {
    world.hosts.now += 1;
    match happening {
        Happening::Turn => world.turn(),
        Happening::Drive(luck) => world.drive(*luck),
        Happening::Observe(side) => world.observe(*side),
        Happening::Progress => world.hosts.progress(),
        Happening::SourceNotices => world.hosts.source_notices(),
        Happening::DestinationNotices => world.hosts.destination_notices(),
        Happening::HoldLimit => world.hosts.hold_limit(),
        Happening::PlannerDies => world.planner_dies(),
        Happening::Cut => world.hosts.channel = Channel::Cut,
        Happening::Mends => world.hosts.channel = Channel::Whole,
        Happening::Stall => world.hosts.stall(),
        Happening::Resumed => world.hosts.someone_resumes(),
        Happening::Kill(side) => world.hosts.kill(*side),
        Happening::AgentTurns(side) => {
            let end = world.hosts.end_mut(*side);
            end.agent = match end.agent {
                Agent::Up => Agent::Down,
                Agent::Down => Agent::Up,
            };
        }
        Happening::MonitorTurns => {
            let end = &mut world.hosts.source;
            end.monitor = match end.monitor {
                Monitor::Answers => Monitor::Silent,
                Monitor::Silent => Monitor::Answers,
            };
        }
        Happening::Arrives(at) => world.arrives(*at),
        Happening::TimePasses(ms) => world.hosts.now += ms,
        Happening::Cancel => world.apply(Event::CancelRequested),
        Happening::GatesOpen => {
            world.apply(Event::StartAllowed);
            world.apply(Event::SwitchoverAllowed);
            if world.row.label() == PhaseLabel::Restored {
                world.apply(Event::CommitAllowed);
            }
        }
    }
}

/// What must hold at every moment.
fn check(world: &World) {
    let hosts = &world.hosts;
    assert!(!(hosts.source.runs() && hosts.destination.runs()), "a guest runs twice");
    if hosts.destination.continued == Continued::Yes {
        assert!(!hosts.source.runs(), "the source runs beside what went on elsewhere");
    }
    let rows = std::iter::once(&world.first).chain(world.log.iter().map(|entry| &entry.after));
    for (before, entry) in rows.zip(&world.log) {
        let breaches = check_step(before, &entry.after);
        assert!(breaches.is_empty(), "{}: {breaches:?}", entry.event.label());
    }
    let events = world.log.iter().map(|entry| &entry.event);
    assert_eq!(replay(&world.first, events).as_ref(), Ok(&world.row), "the log is not the row");
}

/// What must hold once all has come to rest.
fn check_end(world: &World, killed: &[Side]) {
    assert!(world.over(), "{:?} waits for {:?}", world.row.phase, world.waits_for());
    let committed = world.log.iter().any(|entry| entry.after.label() == PhaseLabel::Committed);
    let source_killed = killed.contains(&Side::Source);
    match world.row.label() {
        PhaseLabel::Done => {
            assert_eq!(world.hosts.source.life, Life::Cleared, "the source was not released");
            assert!(world.hosts.destination.runs() || killed.contains(&Side::Destination));
        }
        PhaseLabel::Aborted => {
            let left = world.hosts.destination.life;
            assert!(matches!(left, Life::Never | Life::Cleared), "a receiver leaks: {left:?}");
            assert!(world.hosts.source.runs() || source_killed);
        }
        PhaseLabel::Failed => assert!(!killed.is_empty(), "{:?}", world.row.phase),
        PhaseLabel::Queued
        | PhaseLabel::Admitted
        | PhaseLabel::Captured
        | PhaseLabel::Restored
        | PhaseLabel::Committed
        | PhaseLabel::Attached
        | PhaseLabel::RollingBack => unreachable!("it is over"),
    }
    if world.hosts.source.life == Life::Alive {
        assert_eq!(world.hosts.source.hold, Held::No, "a guest is held for nothing");
        let (held, let_go) = world.hosts.source.holds;
        assert_eq!(held, let_go, "a guest goes on as often as it was held");
    }
    if !committed && !source_killed && world.hosts.source.life == Life::Alive {
        assert!(world.hosts.source.runs(), "a guest that did not move does not run on");
    }
    assert!(world.row.books().reserved.is_empty(), "a reservation leaks");
}

fn gates() -> impl Strategy<Value = Gates> {
    let gate = || prop_oneof![3 => Just(Gate::Open), 1 => Just(Gate::Closed)];
    (gate(), gate(), gate()).prop_map(|(start, switchover, commit)| Gates {
        start,
        switchover,
        commit,
    })
}

/// How a guest is to be carried, and what may become of that.
fn ways() -> impl Strategy<Value = (Method, Downgrade)> {
    prop_oneof![
        Just((Method::Precopy, Downgrade::Never)),
        Just((Method::Precopy, Downgrade::Snapshot)),
        Just((Method::Snapshot, Downgrade::Never)),
    ]
}

proptest! {
    #[test]
    fn any_schedule_keeps_the_invariants(
        gates in gates(),
        (method, downgrade) in ways(),
        undisturbed in 0usize..16,
        happenings in prop::collection::vec(happening(), 0..60),
    ) {
        let mut world = World::open(gates, method, downgrade);
        for _ in 0..undisturbed {
            world.turn();
        }
        let mut killed = Vec::new();
        for happening in &happenings {
            if let Happening::Kill(side) = happening {
                killed.push(*side);
            }
            happen(&mut world, happening);
            check(&world);
        }
        // All accidents end; what is left has to come to an end by itself.
        world.hosts.source.agent = Agent::Up;
        world.hosts.destination.agent = Agent::Up;
        world.hosts.source.monitor = Monitor::Answers;
        for _ in 0..200 {
            if world.over() {
                break;
            }
            world.turn();
            happen(&mut world, &Happening::GatesOpen);
            check(&world);
        }
        check_end(&world, &killed);
    }
}
