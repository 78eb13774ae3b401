//! Halves of migrations that no row of the store drives (rule R13).

use vmferry_types::{Claim, Generation, HostId, MigrationId, Millis, Role, VmId};

use super::picture::{GaveUp, Picture, Process, Remains};
use super::{Finding, Severity};
use crate::evidence::{Continued, Handed, RunState};

/// An answer may have been under way while its migration ended; what is older than this is not.
const UNDER_WAY: Millis = Millis(10_000);

/// Which end of a migration a half is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalfSide {
    /// The source: it has, or had, the guest.
    Source,
    /// The destination: a receiver.
    Destination,
}

impl HalfSide {
    /// Returns the one spelling.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }
}

/// One end of a migration that an agent journals as open and that nobody drives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenHalf {
    /// The migration that its journal names.
    pub migration: MigrationId,
    /// Where it is.
    pub host: HostId,
    /// Which end.
    pub side: HalfSide,
    /// What is there.
    pub there: Remains,
}

impl OpenHalf {
    /// Says in a sentence what stands there.
    #[must_use]
    pub fn words(&self) -> String {
        let Remains { name, .. } = &self.there;
        let host = &self.host;
        match self.side {
            HalfSide::Destination if self.there.continued == Continued::Yes => {
                format!(
                    "the guest of {name} was continued on host {host} by a migration that nobody ended"
                )
            }
            HalfSide::Destination => {
                format!("a receiver for {name} waits on host {host}")
            }
            HalfSide::Source if self.there.handed == Handed::Yes => format!(
                "the switchover of {name} was ordered on host {host}, and its guest there stands still until someone says which side is the right one"
            ),
            HalfSide::Source if self.there.gave_up == GaveUp::Yes => format!(
                "{name} was being sent from host {host}, which took that back: its guest goes on there"
            ),
            HalfSide::Source => format!("{name} is being sent from host {host}"),
        }
    }
}

/// Finds the halves that nobody drives.
#[must_use]
pub fn open_halves(picture: &Picture) -> Vec<OpenHalf> {
    let all = || {
        picture.hosts.iter().flat_map(|host| host.vms.iter().map(move |there| (&host.id, there)))
    };
    let mut halves: Vec<OpenHalf> = all()
        .filter(|(_, there)| undriven(picture, there))
        .filter_map(|(host, there)| half(host, there))
        .collect();
    // A source whose transfer is merely under way shows by the receiver that it sends to.
    let others: Vec<OpenHalf> = all()
        .filter(|(host, there)| {
            there.has_guest()
                && halves.iter().any(|half| {
                    Some(half.migration) == there.migration
                        && half.there.vm == there.vm
                        && half.side == HalfSide::Destination
                        && half.host != **host
                })
                && !halves.iter().any(|half| half.host == **host && half.there.vm == there.vm)
        })
        .filter_map(|(host, there)| {
            let migration = there.migration?;
            let side = HalfSide::Source;
            Some(OpenHalf { migration, host: host.clone(), side, there: there.clone() })
        })
        .collect();
    halves.extend(others);
    halves.sort_by(|a, b| {
        let key = |half: &OpenHalf| (half.migration, half.side == HalfSide::Destination);
        key(a).cmp(&key(b)).then_with(|| a.host.cmp(&b.host))
    });
    halves
}

/// Says whether no open row of the store is of the migration that the journal names.
fn undriven(picture: &Picture, there: &Remains) -> bool {
    let Some(id) = there.migration else { return false };
    picture
        .moves
        .iter()
        .find(|known| known.id == id)
        .is_none_or(|known| known.ended.is_some_and(|ended| picture.now.since(ended) > UNDER_WAY))
}

fn half(host: &HostId, there: &Remains) -> Option<OpenHalf> {
    let migration = there.migration?;
    if there.process != Process::Alive {
        return None;
    }
    let stands = match there.run_state {
        RunState::FinishMigrate | RunState::PostMigrate => true,
        RunState::Running
        | RunState::Paused
        | RunState::InMigrate
        | RunState::Prelaunch
        | RunState::Shutdown
        | RunState::GuestPanicked
        | RunState::IoError
        | RunState::InternalError
        | RunState::Watchdog
        | RunState::Unknown => false,
    };
    let side = match there.role {
        Role::Receiver => HalfSide::Destination,
        Role::Running | Role::Held if there.handed == Handed::Yes || stands => HalfSide::Source,
        Role::Running | Role::Held | Role::Stopped | Role::Absent => return None,
    };
    Some(OpenHalf { migration, host: host.clone(), side, there: there.clone() })
}

pub(super) fn finding(half: &OpenHalf) -> Finding {
    let id = half.migration;
    Finding {
        severity: Severity::Error,
        code: "open_half",
        host: Some(half.host.clone()),
        vm: Some(half.there.vm),
        migration: Some(id),
        message: format!(
            "{}: no row of the store drives migration {id}. Look at both hosts, then keep one side with `vmferry migration resolve {id} --keep source|destination --i-have-checked`",
            half.words()
        ),
    }
}

/// The counters of a half, for whoever ends it.
impl OpenHalf {
    /// Returns the newest generation that its agent knows.
    #[must_use]
    pub const fn generation(&self) -> Generation {
        self.there.generation
    }

    /// Returns the newest claim that its agent knows.
    #[must_use]
    pub const fn claim(&self) -> Claim {
        self.there.claim
    }

    /// Returns the VM.
    #[must_use]
    pub const fn vm(&self) -> VmId {
        self.there.vm
    }
}
