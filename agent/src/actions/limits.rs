//! Changing what limits a transfer that runs.

use vmferry_agent_core::capabilities::Carries;
use vmferry_agent_core::journal::Order;
use vmferry_agent_core::outgoing::Sending;
use vmferry_agent_core::tuning::{Throttle, Tuned};
use vmferry_proto::v1;
use vmferry_types::Fence;

use super::{Outcome, transfer};
use crate::error::CommandError;
use crate::lane::Lane;
use crate::observer::sending_of;

/// Tells QEMU the limits, and then writes down that it was told: an agent that dies in between is
/// told again, which does no harm.
pub(super) async fn run(
    lane: &mut Lane,
    fence: &Fence,
    set: &v1::SetLimits,
) -> Result<Outcome, CommandError> {
    let limits =
        set.limits.ok_or_else(|| CommandError::invalid("set_limits.limits", "is missing"))?;
    transfer::check_owner(lane, fence)?;
    let process = lane.process()?;
    let sending = sending_of(lane.record.outgoing(), &lane.shared.sight.borrow());
    let Some(sent) = lane.record.outgoing() else {
        return Err(CommandError::wrong_state("nothing is being sent for this migration"));
    };
    match &sent.order {
        Order::GaveUp { cause } | Order::TakenBack { cause } => {
            return Err(CommandError::GaveUp(cause.clone()));
        }
        Order::Handed => {
            return Err(CommandError::wrong_state("the switchover was ordered already"));
        }
        Order::Open => {}
    }
    match sending {
        Sending::Connecting | Sending::Moving | Sending::Standing => {}
        Sending::Idle
        | Sending::Switching
        | Sending::Serving
        | Sending::Broken
        | Sending::Mending
        | Sending::Complete
        | Sending::CallingBack
        | Sending::Cancelled
        | Sending::Failed
        | Sending::TakenBack
        | Sending::Other => {
            return Err(CommandError::wrong_state("no memory of the guest crosses now"));
        }
    }
    let asked = if limits.throttle { Throttle::On } else { Throttle::Ready };
    let throttle = throttle(sent.tuned.throttle, asked)?;
    let tuned = Tuned { max_bandwidth: limits.max_bandwidth, throttle };
    let parameters = parameters(tuned, limits.downtime_limit_ms, sent.carries);
    process
        .monitor()
        .execute(parameters)
        .await
        .map_err(|error| CommandError::failed("set the limits of the transfer", &error))?;
    if let Some(sent) = lane.record.outgoing_mut() {
        sent.tuned = tuned;
        sent.downtime_ms = limits.downtime_limit_ms;
    }
    lane.persist().await?;
    Ok(Outcome::default())
}

/// Says whether the guest is slowed down from now on. Once it is, it stays so: QEMU lets go of it at
/// the end of the transfer only.
fn throttle(now: Throttle, asked: Throttle) -> Result<Throttle, CommandError> {
    match (now, asked) {
        (Throttle::Off, Throttle::On) => Err(CommandError::wrong_state(
            "this transfer was not set up so that its guest may be slowed down",
        )),
        (Throttle::Ready | Throttle::On, Throttle::On) => Ok(Throttle::On),
        (Throttle::Off | Throttle::Ready | Throttle::On, Throttle::Off | Throttle::Ready) => {
            Ok(now)
        }
    }
}

/// Writes what QEMU is told of a transfer's limits.
///
/// Memory that follows a guest has no cap unless what that guest waits for goes beside it: capped with
/// the rest, it would stand still for seconds.
pub(super) fn parameters(
    tuned: Tuned,
    downtime_ms: u64,
    carries: Carries,
) -> vmferry_qmp::command::MigrateSetParameters {
    let follows = match carries {
        Carries::Preempt => tuned.max_bandwidth,
        Carries::Whole | Carries::Postcopy => 0,
    };
    let or = |value: u64, default: u64| if value == 0 { default } else { value };
    let downtime = or(downtime_ms, vmferry_agent_core::outgoing::DOWNTIME_LIMIT.value());
    let limits = vmferry_qmp::command::MigrateSetParameters::default()
        .with("max-bandwidth", or(tuned.max_bandwidth, transfer::UNLIMITED))
        .with("max-postcopy-bandwidth", follows)
        .with("downtime-limit", downtime);
    tuned.throttle.parameters().iter().fold(limits, |all, (name, value)| all.with(name, *value))
}
