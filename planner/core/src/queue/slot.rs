//! How many migrations may be at it at once, and where.
//!
//! To prepare a receiver and to transfer memory are two kinds of slots: a prepared receiver waits
//! while a link is busy, and is there when it is free. What waits holds no slot, so one host's drain
//! cannot fill those of the fleet with migrations that its own link keeps waiting.

use std::collections::BTreeMap;
use std::fmt;

use vmferry_types::{HostId, MigrationId, Timestamp};

/// What a migration does that others may have to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Its receiver is being prepared, or is ready and waits for the transfer's slot.
    Preparing,
    /// Its memory crosses, up to the end of the migration.
    Transferring,
}

impl Kind {
    /// Returns the one spelling.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Preparing => "preparing",
            Self::Transferring => "transferring",
        }
    }
}

/// How many slots of one kind there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// In the whole fleet.
    pub fleet: u32,
    /// From one host.
    pub per_source: u32,
    /// To one host.
    pub per_destination: u32,
}

impl Caps {
    /// As many as like.
    pub const NONE: Self =
        Self { fleet: u32::MAX, per_source: u32::MAX, per_destination: u32::MAX };
}

/// How many slots there are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// For receivers.
    pub preparing: Caps,
    /// For transfers.
    pub transferring: Caps,
    /// How many transfers may leave these hosts, by their own word; it stands for that of
    /// `transferring`, whether it is more or less.
    pub own_outbound: BTreeMap<HostId, u32>,
}

impl Limits {
    /// Returns the caps for what goes from one host.
    fn of(&self, kind: Kind, source: &HostId) -> Caps {
        match kind {
            Kind::Preparing => self.preparing,
            Kind::Transferring => {
                let own = self.own_outbound.get(source).copied();
                let per_source = own.unwrap_or(self.transferring.per_source);
                Caps { per_source, ..self.transferring }
            }
        }
    }
}

/// A migration that holds a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Which.
    pub id: MigrationId,
    /// From where.
    pub source: HostId,
    /// To where.
    pub destination: HostId,
    /// What it does.
    pub kind: Kind,
    /// Since when.
    pub since: Timestamp,
}

/// A migration that wants one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Which.
    pub id: MigrationId,
    /// From where.
    pub source: HostId,
    /// To where.
    pub destination: HostId,
    /// For what.
    pub kind: Kind,
}

/// Which limit is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The fleet's.
    Fleet,
    /// That of a host that sends.
    Source(HostId),
    /// That of a host that receives.
    Destination(HostId),
}

/// Why a migration waits for a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Full {
    /// Which limit is reached.
    pub limit: Limit,
    /// Of what.
    pub kind: Kind,
    /// How many there are.
    pub running: u32,
    /// How many there may be.
    pub max: u32,
    /// Since when so many are. `None` if none may be.
    pub since: Option<Timestamp>,
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} {}", self.running, self.max, self.kind.label())?;
        match &self.limit {
            Limit::Fleet => f.write_str(" in the fleet"),
            Limit::Source(host) => write!(f, " from {host}"),
            Limit::Destination(host) => write!(f, " to {host}"),
        }
    }
}

/// Who may go on, and who waits for what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Granted {
    /// These may go on now.
    pub go: Vec<MigrationId>,
    /// These wait, each with every limit that is in its way.
    pub wait: Vec<(MigrationId, Vec<Full>)>,
}

/// Gives slots to those that want them, in their order; one that has to wait holds nobody up.
#[must_use]
pub fn grant(limits: &Limits, holders: &[Holder], wanted: &[Wanted], now: Timestamp) -> Granted {
    let mut held = holders.to_vec();
    let mut granted = Granted::default();
    for one in wanted {
        let full = in_the_way(limits, &held, one);
        if full.is_empty() {
            granted.go.push(one.id);
            // Who goes on to transfer leaves the slot of its preparation.
            held.retain(|holder| holder.id != one.id);
            held.push(Holder {
                id: one.id,
                source: one.source.clone(),
                destination: one.destination.clone(),
                kind: one.kind,
                since: now,
            });
        } else {
            granted.wait.push((one.id, full));
        }
    }
    granted
}

/// Returns every limit that keeps a migration from a slot.
fn in_the_way(limits: &Limits, held: &[Holder], one: &Wanted) -> Vec<Full> {
    let caps = limits.of(one.kind, &one.source);
    let of = |limit: Limit, max: u32| {
        let same = |holder: &&Holder| {
            let there = match &limit {
                Limit::Fleet => true,
                Limit::Source(host) => holder.source == *host,
                Limit::Destination(host) => holder.destination == *host,
            };
            holder.kind == one.kind && holder.id != one.id && there
        };
        let since = held.iter().filter(same).map(|holder| holder.since).max();
        let running = u32::try_from(held.iter().filter(same).count()).unwrap_or(u32::MAX);
        (running >= max).then_some(Full { limit, kind: one.kind, running, max, since })
    };
    [
        of(Limit::Fleet, caps.fleet),
        of(Limit::Source(one.source.clone()), caps.per_source),
        of(Limit::Destination(one.destination.clone()), caps.per_destination),
    ]
    .into_iter()
    .flatten()
    .collect()
}
