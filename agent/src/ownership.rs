//! Whether a command may act on a guest that a planner says another host owns by now.

use vmferry_proto::v1::execute_request::Action;
use vmferry_types::{Fence, FenceRefusal};

use crate::agent::Agent;
use crate::told::Owner;

/// Refuses a command that would let a guest run here, or send it away, though another host owns it
/// by a generation that is newer than the command's.
///
/// The fence alone does not know of it: nobody commanded this host since. A host that was declared
/// dead and comes back may still find commands under way to it from before.
pub(crate) fn check(agent: &Agent, fence: &Fence, action: &Action) -> Result<(), FenceRefusal> {
    if !lets_run(action) {
        return Ok(());
    }
    let told = agent.told();
    let Some(word) = told.of(fence.vm) else { return Ok(()) };
    match &word.owner {
        Owner::Elsewhere(_) if word.generation > fence.generation => {
            Err(FenceRefusal::StaleGeneration { known: word.generation })
        }
        Owner::Elsewhere(_) | Owner::Here | Owner::Unplaced | Owner::NoSuchVm => Ok(()),
    }
}

/// Says whether a guest may run by this command that did not before.
const fn lets_run(action: &Action) -> bool {
    match action {
        Action::StartVm(_)
        | Action::StartReceiver(_)
        | Action::ShutDownGuest(_)
        | Action::ArmReceiver(_)
        | Action::StartTransfer(_)
        | Action::OrderSwitchover(_)
        | Action::CancelTransfer(_)
        | Action::ResumeSource(_)
        | Action::StartPostcopy(_)
        | Action::RecoverReceiver(_)
        | Action::ResumeTransfer(_)
        | Action::ContinueDestination(_) => true,
        Action::StopVm(_)
        | Action::HoldGuest(_)
        | Action::DestroyReceiver(_)
        | Action::ReleaseSource(_)
        | Action::KillSource(_)
        | Action::SetLimits(_)
        | Action::ForgetVm(_) => false,
    }
}
