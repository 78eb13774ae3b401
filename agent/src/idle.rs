//! VMs that were claimed here and never more: how many of them are kept.
//!
//! A claim for a VM that was never heard of is taken up and written down, since the fence has to
//! hold from then on. Whoever makes ids up must not fill the disk and the memory with that.

use std::sync::Arc;

use vmferry_agent_core::journal::{Part, VmRecord};
use vmferry_types::Millis;

use crate::agent::Agent;
use crate::clock;
use crate::error::CommandError;
use crate::vm::VmHandle;

/// How many are kept.
const CLAIMED_MAX: usize = 256;
/// A command that is still under way after so long is one of another age.
const FORGOTTEN: Millis = Millis(3_600_000);

/// Makes room for one more.
///
/// # Errors
///
/// Refuses if there are too many that were claimed lately.
pub(crate) async fn make_room(agent: &Arc<Agent>) -> Result<(), CommandError> {
    let claimed: Vec<VmHandle> =
        agent.vms().into_iter().filter(|vm| only_claimed(&vm.shared.record.borrow())).collect();
    if claimed.len() < CLAIMED_MAX {
        return Ok(());
    }
    let oldest = claimed.into_iter().min_by_key(|vm| vm.shared.heard());
    let now = clock::monotonic();
    let Some(oldest) = oldest.filter(|vm| now.less(vm.shared.heard()) >= FORGOTTEN) else {
        return Err(CommandError::TooManyVms(CLAIMED_MAX));
    };
    oldest.forget().await?;
    agent.drop_vm(&oldest);
    Ok(())
}

/// Says whether nothing was ever done to a VM but to claim it.
pub(crate) fn only_claimed(record: &VmRecord) -> bool {
    let nothing = match &record.part {
        // A claim clears the last command: one that is there was carried out, or refused half-way.
        Part::Absent => {
            record.ended.is_none() && record.name.is_empty() && record.fence.last.is_none()
        }
        Part::Stopped { .. } | Part::Running { .. } | Part::Receiver { .. } => false,
    };
    // What a planner told of has to be known for longer than anybody claims. One without a claim
    // is just being claimed.
    let told = record.fence.migration.is_none() && record.fence.claim.value() > 0;
    nothing && !told
}

#[cfg(test)]
mod tests {
    use vmferry_agent_core::fence::LastCommand;
    use vmferry_types::{Claim, Generation, MigrationId, VmId};

    use super::*;

    #[test]
    fn a_vm_that_a_planner_told_of_is_more_than_a_claim() {
        let mut record = VmRecord::new(VmId::from_u128(1));
        record.fence.generation = Generation::FIRST;
        record.fence.claim = Claim::FIRST;
        assert!(!only_claimed(&record));
        record.fence.claim(MigrationId::from_u128(2), Generation::FIRST, Claim::FIRST.next());
        assert!(only_claimed(&record));
        let last = LastCommand { digest: "one".to_owned(), answer: None };
        record.fence.last = Some(last);
        assert!(!only_claimed(&record), "it was commanded");
        record.fence.last = None;
        record.name = "web1".to_owned();
        assert!(!only_claimed(&record), "it was to run here once");
    }
}
