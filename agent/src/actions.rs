//! What an agent does to a VM on command, one verb a file.
//!
//! Each is idempotent: a command that was begun and never answered is carried out again, and one
//! that comes under a higher step finds done what is done. Each writes down what it is about to do
//! before it does it ([`Lane::persist`](crate::lane::Lane::persist)); the answer is written by the
//! lane.

use vmferry_agent_core::journal::Gone;
use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;
use vmferry_types::Fence;

use crate::error::CommandError;
use crate::lane::Lane;
use crate::live::{Knowledge, Sight};

mod arm;
mod cancel;
mod continue_guest;
mod destroy;
mod end;
mod forget;
mod hold;
mod kill;
mod launch;
mod limits;
mod mend;
mod order;
mod postcopy;
mod protect;
mod release;
mod resume;
mod shut_down;
mod stand;
mod start;
mod stop;
mod transfer;

pub(crate) use self::cancel::go_on;
pub(crate) use self::end::clear;
pub(crate) use self::mend::{Waiting, force};

/// What a command led to, beside what is observed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) listener: Option<v1::Listener>,
    pub(crate) gone: Option<Gone>,
    pub(crate) resolved_machine: String,
}

impl Outcome {
    fn gone(gone: Gone) -> Self {
        Self { gone: Some(gone), ..Self::default() }
    }
}

/// Returns the action's name in logs and fault points.
pub(crate) const fn label(action: &Action) -> &'static str {
    match action {
        Action::StartVm(_) => "start_vm",
        Action::StopVm(_) => "stop_vm",
        Action::ArmReceiver(_) => "arm_receiver",
        Action::StartTransfer(_) => "start_transfer",
        Action::OrderSwitchover(_) => "order_switchover",
        Action::CancelTransfer(_) => "cancel_transfer",
        Action::ResumeSource(_) => "resume_source",
        Action::ContinueDestination(_) => "continue_destination",
        Action::DestroyReceiver(_) => "destroy_receiver",
        Action::ReleaseSource(_) => "release_source",
        Action::KillSource(_) => "kill_source",
        Action::ForgetVm(_) => "forget_vm",
        Action::HoldGuest(_) => "hold_guest",
        Action::ShutDownGuest(_) => "shut_down_guest",
        Action::StartReceiver(_) => "start_receiver",
        Action::StartPostcopy(_) => "start_postcopy",
        Action::RecoverReceiver(_) => "recover_receiver",
        Action::ResumeTransfer(_) => "resume_transfer",
        Action::SetLimits(_) => "set_limits",
    }
}

/// Refuses what may not be done with what is known of the process now.
///
/// A process that says nothing can still be ended: whose process it is, is known for certain, and
/// one that hangs at the switchover has no other way out (rule R10).
pub(crate) fn check_knowledge(action: &Action, sight: &Sight) -> Result<(), CommandError> {
    match (sight.knowledge, action) {
        (Knowledge::Known, _) => Ok(()),
        (Knowledge::Learning, _) => Err(CommandError::Learning),
        (Knowledge::Unreadable, _) => Err(CommandError::Unreadable(sight.trouble.clone())),
        (
            Knowledge::Unresponsive,
            Action::DestroyReceiver(_)
            | Action::ReleaseSource(_)
            | Action::KillSource(_)
            | Action::ResumeSource(_)
            | Action::CancelTransfer(_)
            | Action::RecoverReceiver(_)
            | Action::StopVm(_),
        ) => Ok(()),
        (
            Knowledge::Unresponsive,
            Action::StartVm(_)
            | Action::ArmReceiver(_)
            | Action::StartTransfer(_)
            | Action::OrderSwitchover(_)
            | Action::ContinueDestination(_)
            | Action::ForgetVm(_)
            | Action::StartPostcopy(_)
            | Action::ResumeTransfer(_)
            | Action::SetLimits(_)
            | Action::ShutDownGuest(_)
            | Action::StartReceiver(_)
            | Action::HoldGuest(_),
        ) => Err(CommandError::Unresponsive(sight.trouble.clone())),
    }
}

/// Carries a command out.
pub(crate) async fn run(
    lane: &mut Lane,
    fence: &Fence,
    action: Action,
) -> Result<Outcome, CommandError> {
    match action {
        Action::StartVm(start) => start::run(lane, fence, start).await,
        Action::StopVm(stop) => stop::run(lane, &stop).await,
        Action::ArmReceiver(arm) => arm::run(lane, fence, arm).await,
        Action::StartTransfer(transfer) => transfer::run(lane, fence, &transfer).await,
        Action::OrderSwitchover(v1::OrderSwitchover {}) => order::run(lane).await,
        Action::CancelTransfer(cancel) => cancel::run(lane, fence, cancel).await,
        Action::ResumeSource(resume) => resume::run(lane, resume).await,
        Action::ContinueDestination(v1::ContinueDestination {}) => {
            continue_guest::run(lane, fence).await
        }
        Action::DestroyReceiver(destroy) => destroy::run(lane, fence, &destroy).await,
        Action::ReleaseSource(release) => release::run(lane, fence, release).await,
        Action::KillSource(kill) => kill::run(lane, fence, &kill).await,
        Action::ForgetVm(v1::ForgetVm {}) => forget::run(lane),
        Action::HoldGuest(v1::HoldGuest {}) => hold::run(lane, fence).await,
        Action::ShutDownGuest(v1::ShutDownGuest {}) => shut_down::run(lane, fence).await,
        Action::StartReceiver(start) => stand::run(lane, fence, start).await,
        Action::StartPostcopy(v1::StartPostcopy {}) => postcopy::run(lane, fence).await,
        Action::RecoverReceiver(v1::RecoverReceiver {}) => mend::recover(lane, fence).await,
        Action::ResumeTransfer(resume) => mend::resume(lane, &resume).await,
        Action::SetLimits(set) => limits::run(lane, fence, &set).await,
    }
}

/// Writes an answer so that it can be given again.
pub(crate) fn encode_answer(reply: &v1::ExecuteReply) -> String {
    use std::fmt::Write as _;
    prost::Message::encode_to_vec(reply).iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let written = write!(text, "{byte:02x}");
        debug_assert!(written.is_ok());
        text
    })
}

/// Gives the first answer again.
pub(crate) fn replay(answer: &str) -> Result<v1::ExecuteReply, CommandError> {
    let broken = || CommandError::Failed {
        operation: "read the first answer from the journal",
        cause: "it is no answer of this agent's version".to_owned(),
    };
    let bytes: Option<Vec<u8>> = answer
        .as_bytes()
        .chunks(2)
        .map(|pair| std::str::from_utf8(pair).ok().and_then(|hex| u8::from_str_radix(hex, 16).ok()))
        .collect();
    let reply: v1::ExecuteReply =
        prost::Message::decode(bytes.ok_or_else(broken)?.as_slice()).map_err(|_| broken())?;
    Ok(v1::ExecuteReply { replayed: true, ..reply })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_given_again_as_it_was() {
        let reply = v1::ExecuteReply {
            resolved_machine: "pc-q35-10.0".to_owned(),
            listener: Some(v1::Listener {
                address: "127.0.0.1".to_owned(),
                port: 49152,
                ..v1::Listener::default()
            }),
            ..v1::ExecuteReply::default()
        };
        let again = replay(&encode_answer(&reply)).unwrap();
        assert_eq!(again, v1::ExecuteReply { replayed: true, ..reply });
        assert!(replay("zz").is_err());
    }
}
