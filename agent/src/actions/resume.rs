//! Letting the source's guest go on after an ordered switchover.

use std::time::Duration;

use vmferry_agent_core::journal::{Order, Part};
use vmferry_agent_core::outgoing::Sending;
use vmferry_proto::v1;
use vmferry_qmp::command::Cont;

use super::{Outcome, cancel, hold};
use crate::error::CommandError;
use crate::lane::Lane;
use crate::observer::sending_of;

/// How long QEMU may take to let the guest run.
const RUNNING: Duration = Duration::from_secs(10);

pub(super) async fn run(
    lane: &mut Lane,
    resume: v1::ResumeSource,
) -> Result<Outcome, CommandError> {
    if sending_of(lane.record.outgoing(), &lane.shared.sight.borrow()).divided() {
        return Err(CommandError::wrong_state(
            "the guest left before its memory: postcopy has no way back",
        ));
    }
    let own = lane.agent.config.host_id.to_string();
    let generation = lane.record.fence.generation;
    let Part::Running { process, .. } = &mut lane.record.part else {
        return Err(CommandError::wrong_state("the VM does not run here"));
    };
    // A rollback after the commit comes under the next generation: it is this host's again.
    process.generation = generation;
    let Some(sent) = lane.record.outgoing_mut() else {
        return Err(CommandError::wrong_state("nothing was sent for this migration"));
    };
    match &sent.order {
        Order::Handed => {
            let cause = proof(resume.receiver_gone.as_ref(), &own)?;
            sent.order = Order::TakenBack { cause };
        }
        Order::Open => sent.order = Order::GaveUp { cause: "resumed by command".to_owned() },
        Order::GaveUp { .. } | Order::TakenBack { .. } => {}
    }
    lane.record.let_go();
    // The proof must be on the disk before the guest can run: after it, a new start of this agent
    // must know that it may.
    lane.persist().await?;
    let sending = sending_of(lane.record.outgoing(), &lane.shared.sight.borrow());
    match sending {
        Sending::Complete => cont(lane).await?,
        Sending::Connecting
        | Sending::Moving
        | Sending::Standing
        | Sending::Switching
        | Sending::CallingBack
        | Sending::Serving
        | Sending::Broken
        | Sending::Mending
        | Sending::Other => {
            cancel::call_back(lane).await?;
            // The rest may have crossed just before.
            let sending = sending_of(lane.record.outgoing(), &lane.shared.sight.borrow());
            if sending == Sending::Complete {
                cont(lane).await?;
            }
        }
        // QEMU let it go on by itself, unless it is held.
        Sending::Idle | Sending::Cancelled | Sending::Failed | Sending::TakenBack => {}
    }
    hold::let_go(lane).await?;
    Ok(Outcome::default())
}

pub(super) async fn cont(lane: &Lane) -> Result<(), CommandError> {
    let process = lane.process()?;
    process
        .monitor()
        .execute(Cont {})
        .await
        .map_err(|error| CommandError::failed("let the guest go on", &error))?;
    lane.shared.wait(RUNNING, crate::live::Sight::running).await.map(drop).map_err(|sight| {
        CommandError::Unresponsive(format!("the guest does not run yet: {:?}", sight.run_state))
    })
}

/// Reads the proof that the receiver is gone.
fn proof(proof: Option<&v1::GoneProof>, own: &str) -> Result<String, CommandError> {
    let field = "resume_source.receiver_gone";
    let Some(proof) = proof else {
        return Err(CommandError::invalid(
            field,
            "is missing: the switchover was ordered, and without proof that the receiver is gone two guests could run",
        ));
    };
    if proof.kind() == v1::ProofKind::Unspecified {
        return Err(CommandError::invalid(field, "does not say how it is known"));
    }
    if proof.host_id.is_empty() || proof.host_id == own {
        return Err(CommandError::invalid(field, "must be of the destination"));
    }
    Ok(format!("the receiver on {} is gone: {}", proof.host_id, proof.ended))
}
