//! How bad a world is, and for how long.

use crate::dice::Dice;

/// How often what goes wrong, in a thousand; spans in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weather {
    /// Until when anything goes wrong, since the world began.
    pub calm_at_ms: u64,
    /// How long a message takes, at most.
    pub delay_max: u64,
    /// A request or an answer is lost.
    pub lost: u64,
    /// A command arrives twice.
    pub doubled: u64,
    /// A command arrives, or arrives again, up to a minute late.
    pub late: u64,
    /// An agent fails a command without having done anything.
    pub fails: u64,
    /// An agent dies at one of its steps.
    pub agent_dies: u64,
    /// A planner dies at one of its calls.
    pub planner_dies: u64,
    /// A QEMU process dies at a change of its state.
    pub qemu_dies: u64,
    /// A channel breaks at a change of its state.
    pub channel_breaks: u64,
    /// A source's monitor falls silent while its last is sent.
    pub silent: u64,
    /// How long a write of the store takes, at most.
    pub store_max: u64,
    /// A call of the store fails, in half of the cases after it was carried out.
    pub store_fails: u64,
    /// How far clocks of planners and hosts are apart, at most; 0 is not at all.
    pub skew_max: u64,
    /// A migration holds its guest from the beginning.
    pub held: u64,
    /// A live migration that is refused may go on as a held one.
    pub downgrades: u64,
    /// A migration lets its guest go before its memory, or may.
    pub postcopy: u64,
    /// How many moves are made at the hosts, without a planner.
    pub by_hand: u32,
    /// A migration waits at a gate for an operator.
    pub gated: u64,
    /// How long there is between two blows, at most; 0 is none.
    pub blow_every: u64,
    /// Which blows there are.
    pub blows: Vec<Blow>,
    /// How long a planner that died stays away, at most.
    pub planner_back: u64,
    /// How many guests fit into a host.
    pub room: u64,
    /// How many planners share the store.
    pub planners: u32,
    /// How many VMs there are.
    pub vms: u32,
    /// How many hosts there are.
    pub hosts: u32,
    /// How many migrations are asked for.
    pub migrations: u32,
    /// How long there is between two of them, at most.
    pub migration_every: u64,
    /// A migration is asked to be cancelled.
    pub cancelled: u64,
    /// A receiver or a start is refused.
    pub blocked: u64,
    /// How many starts and stops are asked for.
    pub powers: u32,
    /// A guest does not listen when it is asked to power off.
    pub deaf: u64,
    /// How much is asked of hosts: cordons, maintenance, drains, retirements, and their ends.
    pub emptyings: u32,
}

/// What goes wrong beside messages and steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blow {
    /// A planner is killed, and another one starts.
    Planner,
    /// An agent is killed and started again.
    Agent,
    /// A QEMU process is killed.
    Qemu,
    /// A host crashes and boots again.
    Host,
    /// A host crashes for good, and an operator says so.
    HostForGood,
    /// Two hosts cannot reach each other.
    HostsApart,
    /// A planner cannot reach a host.
    PlannerApart,
    /// A planner's store does not answer for a while.
    StoreApart,
    /// A planner's machine stands still for a while.
    Freeze,
    /// A transfer's channel breaks.
    Channel,
    /// A monitor is silent.
    Silence,
    /// A guest turns itself off.
    PowerOff,
    /// A wall clock jumps.
    Clock,
    /// A host's journal is lost; its agent starts without.
    Journal,
}

impl Blow {
    /// Says whether QEMU processes and their hosts outlive it.
    const fn spares_guests(self) -> bool {
        match self {
            Self::Planner
            | Self::Agent
            | Self::PlannerApart
            | Self::StoreApart
            | Self::Freeze
            | Self::Silence
            | Self::Clock => true,
            Self::Qemu
            | Self::Host
            | Self::HostForGood
            | Self::HostsApart
            | Self::Channel
            | Self::PowerOff
            | Self::Journal => false,
        }
    }
}

const BLOWS: [Blow; 13] = [
    Blow::Planner,
    Blow::Agent,
    Blow::Qemu,
    Blow::Host,
    Blow::HostForGood,
    Blow::HostsApart,
    Blow::PlannerApart,
    Blow::StoreApart,
    Blow::Freeze,
    Blow::Channel,
    Blow::Silence,
    Blow::PowerOff,
    Blow::Clock,
];

impl Weather {
    /// Nothing goes wrong.
    #[must_use]
    pub const fn fair() -> Self {
        Self {
            calm_at_ms: 0,
            delay_max: 2,
            lost: 0,
            doubled: 0,
            late: 0,
            fails: 0,
            agent_dies: 0,
            planner_dies: 0,
            qemu_dies: 0,
            channel_breaks: 0,
            silent: 0,
            store_max: 1,
            store_fails: 0,
            skew_max: 0,
            held: 0,
            downgrades: 0,
            postcopy: 0,
            by_hand: 0,
            gated: 0,
            blow_every: 0,
            blows: Vec::new(),
            planner_back: 6_000,
            room: 3,
            planners: 1,
            vms: 1,
            hosts: 2,
            migrations: 1,
            migration_every: 0,
            cancelled: 0,
            blocked: 0,
            powers: 0,
            deaf: 0,
            emptyings: 0,
        }
    }

    /// Draws what goes wrong in one world. Each world gets some of it: what happens everywhere
    /// hides what happens alone.
    #[must_use]
    pub fn drawn(seed: u64) -> Self {
        let mut dice = Dice::new(seed, "weather");
        let mut some = |low, high| if dice.chance(400) { dice.between(low, high) } else { 0 };
        let mut weather = Self {
            lost: some(5, 120),
            doubled: some(20, 300),
            late: some(5, 120),
            fails: some(10, 150),
            agent_dies: some(2, 60),
            planner_dies: some(1, 30),
            qemu_dies: some(2, 40),
            channel_breaks: some(10, 150),
            silent: some(50, 400),
            cancelled: some(100, 700),
            blocked: some(50, 300),
            store_fails: some(5, 60),
            skew_max: some(50, 30_000),
            held: some(100, 900),
            downgrades: some(300, 1_000),
            gated: some(200, 800),
            deaf: some(100, 500),
            ..Self::fair()
        };
        weather.calm_at_ms = dice.between(5_000, 40_000);
        weather.delay_max =
            if dice.chance(300) { dice.between(20, 400) } else { dice.between(1, 10) };
        weather.store_max = if dice.chance(200) { dice.between(50, 3_000) } else { 2 };
        weather.blow_every = if dice.chance(800) { dice.between(300, 8_000) } else { 0 };
        weather.blows = BLOWS.into_iter().filter(|_| dice.chance(350)).collect();
        // What ran where a journal is lost is for a person to end: rare, or there would be little else
        // to see.
        if dice.chance(120) {
            weather.blows.push(Blow::Journal);
        }
        weather.planner_back = if dice.chance(300) { dice.between(6_000, 60_000) } else { 6_000 };
        weather.room = if dice.chance(500) { 2 } else { 3 };
        weather.planners = u32::try_from(dice.between(1, 3)).unwrap_or(1);
        weather.vms = u32::try_from(dice.between(1, 3)).unwrap_or(1);
        weather.hosts = u32::try_from(dice.between(2, 4)).unwrap_or(2);
        weather.migrations = u32::try_from(dice.between(1, 5)).unwrap_or(1);
        weather.migration_every = dice.between(0, 8_000);
        // A move that is made by hand is nobody's to end once its host is gone.
        if dice.chance(100) {
            weather.by_hand = u32::try_from(dice.between(1, 3)).unwrap_or(1);
            // Nor does whoever makes one look for room.
            weather.room = 4;
            weather.qemu_dies = 0;
            weather.channel_breaks = 0;
            weather.blows.retain(|blow| blow.spares_guests());
        }
        // Drawn apart, so that all else stays what it was.
        let mut apart = Dice::new(seed, "postcopy");
        weather.postcopy = if apart.chance(500) { apart.between(200, 1_000) } else { 0 };
        let mut apart = Dice::new(seed, "emptyings");
        if apart.chance(400) {
            weather.emptyings = u32::try_from(apart.between(1, 8)).unwrap_or(1);
        }
        weather.powers =
            if dice.chance(500) { u32::try_from(dice.between(1, 6)).unwrap_or(1) } else { 0 };
        weather
    }
}
