//! What may be asked of a host now.
//!
//! One thing at a time empties a host, or holds it empty: a second one is refused and named the
//! first. A plan touches nothing, so a newer one takes its place. The whole table is printed by the
//! test `what_may_be_asked_is_as_reviewed`.

use vmferry_types::{DrainId, HostId, JobId, Timestamp};

use super::cordon::{Cordon, Owner};
use super::drain::{self, Drain, Goal};
use super::emptiness::Presence;
use super::job::{self, Job};

/// What is asked of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Asked {
    /// To take no placements.
    Cordon,
    /// To take them again.
    Uncordon,
    /// Where its VMs would go.
    Plan,
    /// To empty it for maintenance.
    Execute,
    /// To empty it and keep it empty.
    Drain,
    /// To empty it and be rid of it.
    Retire,
    /// To forget it.
    Delete,
}

impl Asked {
    /// Everything that can be asked.
    pub const ALL: &'static [Self] = &[
        Self::Cordon,
        Self::Uncordon,
        Self::Plan,
        Self::Execute,
        Self::Drain,
        Self::Retire,
        Self::Delete,
    ];

    /// Returns the one spelling.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Cordon => "cordon",
            Self::Uncordon => "uncordon",
            Self::Plan => "plan",
            Self::Execute => "execute",
            Self::Drain => "drain",
            Self::Retire => "retire",
            Self::Delete => "delete",
        }
    }
}

/// How a host stands, as the store and its agent say.
#[derive(Clone, Copy, Debug)]
pub struct Standing<'a> {
    /// The host.
    pub host: &'a HostId,
    /// Whether its agent answers.
    pub presence: &'a Presence,
    /// How many VMs the store says are there.
    pub vms: usize,
    /// Its newest job, if it has one.
    pub job: Option<&'a Job>,
    /// Its newest drain or retirement, if it has one.
    pub drain: Option<&'a Drain>,
}

/// That something may be done, and what goes with it in the same transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granted {
    /// Only that.
    Alone,
    /// The older plan, which nobody carried out, is superseded.
    Superseding(JobId),
    /// The drain that owns the cordon is cancelled.
    Cancelling(DrainId),
}

/// Why something may not be asked of a host now. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// Its agent does not answer.
    #[error("the agent of host {host} does not answer: bring it back first")]
    NotConnected {
        /// The host.
        host: HostId,
    },
    /// A job is emptying it.
    #[error("maintenance job {job} is emptying host {host}: cancel it first")]
    JobActive {
        /// The host.
        host: HostId,
        /// The job that was there first.
        job: JobId,
    },
    /// It is in maintenance.
    #[error("host {host} is in maintenance by job {job}: complete that first")]
    InMaintenance {
        /// The host.
        host: HostId,
        /// The job.
        job: JobId,
    },
    /// VMs are coming back to it.
    #[error("job {job} is bringing VMs back to host {host}: cancel that or wait for its end")]
    Returning {
        /// The host.
        host: HostId,
        /// The job.
        job: JobId,
    },
    /// It is being drained.
    #[error("host {host} is being emptied by drain {drain}: uncordon it to cancel that")]
    Draining {
        /// The host.
        host: HostId,
        /// The drain that was there first.
        drain: DrainId,
    },
    /// It is being retired.
    #[error("host {host} is being emptied by retirement {drain}: uncordon it to cancel that")]
    Retiring {
        /// The host.
        host: HostId,
        /// The retirement that was there first.
        drain: DrainId,
    },
    /// It is retired.
    #[error("host {host} is retired ({drain}): delete it, or uncordon it to take it back")]
    Retired {
        /// The host.
        host: HostId,
        /// The retirement.
        drain: DrainId,
    },
    /// It is in service.
    #[error("host {host} is not retired: retire it first, so that nothing of it is lost")]
    NotRetired {
        /// The host.
        host: HostId,
    },
}

impl Denied {
    /// Returns the stable code of this refusal.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::NotConnected { .. } => "host_not_connected",
            Self::JobActive { .. } => "maintenance_active",
            Self::InMaintenance { .. } => "in_maintenance",
            Self::Returning { .. } => "returning",
            Self::Draining { .. } => "draining",
            Self::Retiring { .. } => "retiring",
            Self::Retired { .. } => "retired",
            Self::NotRetired { .. } => "not_retired",
        }
    }
}

/// What a host is held by.
enum Holder {
    Nobody,
    Plan(JobId),
    Emptying(JobId),
    Maintenance(JobId),
    Returning(JobId),
    Drain(DrainId),
    Retirement(DrainId),
    Retired(DrainId),
}

/// Says whether `asked` may be done to a host as it stands.
///
/// # Errors
///
/// Names what is there first, and what to do about it.
pub fn may(standing: Standing<'_>, asked: Asked) -> Result<Granted, Denied> {
    match asked {
        Asked::Cordon => Ok(Granted::Alone),
        Asked::Uncordon => uncordon(standing),
        // A host that is not heard is planned for as well: each of its VMs is then a blocker.
        Asked::Plan | Asked::Execute => unheld(standing),
        Asked::Drain | Asked::Retire => {
            // A plan that nobody carried out touches nothing and is left as it is.
            unheld(standing)?;
            match standing.presence {
                Presence::Heard => Ok(Granted::Alone),
                Presence::Silent | Presence::Dead { .. } => {
                    Err(Denied::NotConnected { host: standing.host.clone() })
                }
            }
        }
        Asked::Delete => delete(standing),
    }
}

fn uncordon(standing: Standing<'_>) -> Result<Granted, Denied> {
    let host = standing.host.clone();
    match holder(standing) {
        Holder::Nobody | Holder::Plan(_) | Holder::Returning(_) => Ok(Granted::Alone),
        Holder::Emptying(job) => Err(Denied::JobActive { host, job }),
        Holder::Maintenance(job) => Err(Denied::InMaintenance { host, job }),
        Holder::Drain(drain) | Holder::Retirement(drain) | Holder::Retired(drain) => {
            Ok(Granted::Cancelling(drain))
        }
    }
}

fn unheld(standing: Standing<'_>) -> Result<Granted, Denied> {
    let host = standing.host.clone();
    Err(match holder(standing) {
        Holder::Nobody => return Ok(Granted::Alone),
        Holder::Plan(job) => return Ok(Granted::Superseding(job)),
        Holder::Emptying(job) => Denied::JobActive { host, job },
        Holder::Maintenance(job) => Denied::InMaintenance { host, job },
        Holder::Returning(job) => Denied::Returning { host, job },
        Holder::Drain(drain) => Denied::Draining { host, drain },
        Holder::Retirement(drain) => Denied::Retiring { host, drain },
        Holder::Retired(drain) => Denied::Retired { host, drain },
    })
}

fn delete(standing: Standing<'_>) -> Result<Granted, Denied> {
    let host = standing.host.clone();
    let dead = matches!(standing.presence, Presence::Dead { .. });
    match holder(standing) {
        Holder::Retired(_) => Ok(Granted::Alone),
        // Its death is proven and nothing that it had is left: there is nothing to lose.
        Holder::Nobody | Holder::Plan(_) if dead && standing.vms == 0 => Ok(Granted::Alone),
        Holder::Nobody | Holder::Plan(_) | Holder::Returning(_) => Err(Denied::NotRetired { host }),
        Holder::Emptying(job) => Err(Denied::JobActive { host, job }),
        Holder::Maintenance(job) => Err(Denied::InMaintenance { host, job }),
        Holder::Drain(drain) => Err(Denied::Draining { host, drain }),
        Holder::Retirement(drain) => Err(Denied::Retiring { host, drain }),
    }
}

fn holder(standing: Standing<'_>) -> Holder {
    if let Some(drain) = standing.drain {
        match (drain.hold(), drain.goal) {
            (drain::Hold::Draining, Goal::Drain) => return Holder::Drain(drain.id),
            (drain::Hold::Draining, Goal::Retire) => return Holder::Retirement(drain.id),
            (drain::Hold::Retired, _) => return Holder::Retired(drain.id),
            (drain::Hold::Over, _) => {}
        }
    }
    match standing.job.map(|job| (job.hold(), job.id)) {
        None | Some((job::Hold::Over, _)) => Holder::Nobody,
        Some((job::Hold::Plan, id)) => Holder::Plan(id),
        Some((job::Hold::Emptying, id)) => Holder::Emptying(id),
        Some((job::Hold::Maintenance, id)) => Holder::Maintenance(id),
        Some((job::Hold::Returning, id)) => Holder::Returning(id),
    }
}

/// Returns the cordons of a host that an operator's word lifts, once [`may`] granted it: the
/// operator's own, and those of jobs and drains that are over or are cancelled by it. What other
/// operators hold stays.
#[must_use]
pub fn lifted<'a>(
    cordons: &'a [Cordon],
    host: &HostId,
    operator: &str,
    now: Timestamp,
) -> Vec<&'a Cordon> {
    let lifts = |owner: &Owner| match owner {
        Owner::Operator { name } => name == operator,
        Owner::Job(_) | Owner::Drain(_) => true,
    };
    cordons
        .iter()
        .filter(|cordon| cordon.host == *host && cordon.holds(now) && lifts(&cordon.owner))
        .collect()
}

#[cfg(test)]
mod tests;
