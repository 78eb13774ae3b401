//! Whether a host is empty, by the word of its own agent.
//!
//! A store that knows of no VM on a host proves nothing: a start that was admitted long ago may
//! still be on its way. So three things are asked at once: no reservation is left, no VM is owned
//! by the host, and the agent itself, asked after the last VM had left, names nothing.

use std::fmt;

use vmferry_types::{Timestamp, VmId};

/// Whether the host that is emptied can be asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Presence {
    /// Its agent answers.
    Heard,
    /// It does not, and nothing else is known.
    Silent,
    /// It is proven dead: by an operator's word, a fence command, or a new boot.
    Dead {
        /// How that is known.
        how: String,
    },
}

/// What an agent says of its own host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inside {
    /// A moment by the planner's clock that was over before the agent looked: when the planner
    /// asked, or, for a report that came by itself, when it had answered the one before. When a
    /// report arrived proves nothing: it may have been long on its way.
    pub composed_after: Timestamp,
    /// Why it proves nothing: still learning, a lost journal, an unanswered list. `None` if it does.
    pub unreadable: Option<String>,
    /// VMs with a QEMU process that is no receiver.
    pub guests: Vec<VmId>,
    /// VMs with a receiver.
    pub receivers: Vec<VmId>,
    /// QEMU processes that the agent does not own, in its words.
    pub strangers: Vec<String>,
}

/// What is known of the host that is emptied.
///
/// The store's part is read *before* the agent's: a reservation ends when a report shows its VM, so
/// in the other order a VM could be missed by both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFacts {
    /// Whether it can be asked.
    pub presence: Presence,
    /// VMs with a reservation there.
    pub reserved: Vec<VmId>,
    /// VMs that have to leave: those that the store says are there and that cannot stay behind.
    pub residents: Vec<VmId>,
    /// What its agent last said. `None` if it never spoke to this planner.
    pub inside: Option<Inside>,
}

/// That a host was seen empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Emptiness {
    /// The agent looked after this moment.
    #[cfg_attr(feature = "serde", serde(with = "crate::record::number"))]
    pub composed_after: Timestamp,
}

/// One thing that keeps a host from being called empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotEmpty {
    /// Its agent does not answer.
    Silent,
    /// It never spoke.
    NeverHeard,
    /// What it says proves nothing.
    Unreadable {
        /// Why.
        why: String,
    },
    /// It looked before the last VM had left.
    LookedTooEarly,
    /// It has guests.
    Guests(Vec<VmId>),
    /// It has receivers.
    Receivers(Vec<VmId>),
    /// It runs QEMUs that nobody here knows.
    Strangers(Vec<String>),
    /// Something is on its way to it.
    Reserved(Vec<VmId>),
    /// VMs are still to leave.
    Residents(Vec<VmId>),
}

impl fmt::Display for NotEmpty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent => f.write_str("its agent to answer"),
            Self::NeverHeard => f.write_str("its agent's first report"),
            Self::Unreadable { why } => write!(f, "a report that can be read ({why})"),
            Self::LookedTooEarly => f.write_str("a report from after the last VM had left"),
            Self::Guests(vms) => write!(f, "these guests to leave: {}", list(vms)),
            Self::Receivers(vms) => write!(f, "the receivers of these VMs to go: {}", list(vms)),
            Self::Strangers(all) => {
                write!(f, "QEMU processes that are not vmferry's to end: {}", list(all))
            }
            Self::Reserved(vms) => write!(f, "what is reserved for these VMs: {}", list(vms)),
            Self::Residents(vms) => write!(f, "these VMs to leave: {}", list(vms)),
        }
    }
}

fn list<T: fmt::Display>(all: &[T]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Says that a host is empty since `last`, or everything that keeps it from being called so.
///
/// # Errors
///
/// Names all that is waited for.
pub fn empty(facts: &HostFacts, last: Timestamp) -> Result<Emptiness, Vec<NotEmpty>> {
    let mut missing = Vec::new();
    let mut some = |vms: &[VmId], of: fn(Vec<VmId>) -> NotEmpty| {
        if !vms.is_empty() {
            missing.push(of(vms.to_vec()));
        }
    };
    some(&facts.residents, NotEmpty::Residents);
    some(&facts.reserved, NotEmpty::Reserved);
    if let Some(inside) = &facts.inside {
        some(&inside.guests, NotEmpty::Guests);
        some(&inside.receivers, NotEmpty::Receivers);
    }
    match facts.presence {
        Presence::Heard => {}
        Presence::Silent | Presence::Dead { .. } => missing.push(NotEmpty::Silent),
    }
    let Some(inside) = &facts.inside else {
        missing.push(NotEmpty::NeverHeard);
        return Err(missing);
    };
    if !inside.strangers.is_empty() {
        missing.push(NotEmpty::Strangers(inside.strangers.clone()));
    }
    if let Some(why) = &inside.unreadable {
        missing.push(NotEmpty::Unreadable { why: why.clone() });
    }
    if inside.composed_after <= last {
        missing.push(NotEmpty::LookedTooEarly);
    }
    if missing.is_empty() {
        Ok(Emptiness { composed_after: inside.composed_after })
    } else {
        Err(missing)
    }
}

/// Writes what is waited for as one text.
#[must_use]
pub fn named(missing: &[NotEmpty]) -> String {
    missing.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> HostFacts {
        let inside = Inside {
            composed_after: Timestamp(11),
            unreadable: None,
            guests: vec![],
            receivers: vec![],
            strangers: vec![],
        };
        HostFacts {
            presence: Presence::Heard,
            reserved: vec![],
            residents: vec![],
            inside: Some(inside),
        }
    }

    #[test]
    fn a_host_that_its_agent_calls_empty_after_the_last_end_is() {
        let proof = Emptiness { composed_after: Timestamp(11) };
        assert_eq!(empty(&facts(), Timestamp(10)), Ok(proof));
    }

    #[test]
    fn anything_there_or_on_its_way_or_unsaid_is_named() {
        let vm = vec![VmId::from_u128(1)];
        let inside = |facts: &mut HostFacts, change: &dyn Fn(&mut Inside)| {
            change(facts.inside.as_mut().unwrap());
        };
        type Case<'a> = (&'a dyn Fn(&mut HostFacts), NotEmpty);
        let cases: [Case<'_>; 9] = [
            (&|f| f.presence = Presence::Silent, NotEmpty::Silent),
            (&|f| f.inside = None, NotEmpty::NeverHeard),
            (
                &|f| inside(f, &|i| i.unreadable = Some("learning".into())),
                NotEmpty::Unreadable { why: "learning".into() },
            ),
            (&|f| inside(f, &|i| i.composed_after = Timestamp(10)), NotEmpty::LookedTooEarly),
            (
                &|f| inside(f, &|i| i.guests = vec![VmId::from_u128(1)]),
                NotEmpty::Guests(vm.clone()),
            ),
            (
                &|f| inside(f, &|i| i.receivers = vec![VmId::from_u128(1)]),
                NotEmpty::Receivers(vm.clone()),
            ),
            (
                &|f| inside(f, &|i| i.strangers = vec!["pid 7".into()]),
                NotEmpty::Strangers(vec!["pid 7".into()]),
            ),
            (&|f| f.reserved = vec![VmId::from_u128(1)], NotEmpty::Reserved(vm.clone())),
            (&|f| f.residents = vec![VmId::from_u128(1)], NotEmpty::Residents(vm.clone())),
        ];
        for (change, expected) in cases {
            let mut facts = facts();
            change(&mut facts);
            let missing = empty(&facts, Timestamp(10)).unwrap_err();
            assert_eq!(missing, vec![expected]);
            assert!(!named(&missing).is_empty());
        }
    }
}
