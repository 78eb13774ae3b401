//! Beginning to send.

use vmferry_agent_core::capabilities::{self, Carries, Throttling};
use vmferry_agent_core::journal::{Issue, Order, Outgoing, Part, Parting};
use vmferry_agent_core::outgoing::Sending;
use vmferry_agent_core::tuning::{Throttle, Tuned};
use vmferry_proto::v1;
use vmferry_qmp::command::{Migrate, MigrateSetCapabilities, QueryMigrate};
use vmferry_types::Fence;

use super::{Outcome, limits, postcopy, protect};
use crate::describe;
use crate::error::CommandError;
use crate::lane::Lane;
use crate::observer::sending_of;
use crate::process::QemuProcess;

/// What QEMU is told where no cap is wanted: 0 is not one, and its default is 128 MiB/s.
pub(super) const UNLIMITED: u64 = (1 << 63) - (1 << 20);

pub(super) async fn run(
    lane: &mut Lane,
    fence: &Fence,
    transfer: &v1::StartTransfer,
) -> Result<Outcome, CommandError> {
    let uri = uri("start_transfer.listener", transfer.listener.as_ref())?;
    let armed = transfer.listener.clone().unwrap_or_default();
    let policy = transfer.policy.unwrap_or_default();
    check_owner(lane, fence)?;
    let process = lane.process()?;
    match begun(lane)? {
        Begun::NotYet => {}
        Begun::Noted => return Ok(Outcome::default()),
        Begun::Unnoted => {
            accepted(lane);
            return Ok(Outcome::default());
        }
    }
    let (before, carries) = prepare(&process, &policy, &armed).await?;
    protect::sender(lane, &process, &transfer.receiver_host).await?;
    if let Part::Running { outgoing, .. } = &mut lane.record.part {
        *outgoing = Some(Outgoing {
            migration: fence.migration,
            before: Box::new(before),
            issue: Issue::Intended,
            timeout_ms: policy.timeout_ms,
            stall_ms: policy.stall_ms,
            downtime_ms: policy.downtime_limit_ms,
            tuned: tuned(&policy),
            carries,
            parting: Parting::No,
            order: Order::Open,
        });
    }
    lane.persist().await?;
    if lane.record.hold().is_some() {
        lane.shared.begin_held_attempt();
    } else {
        lane.shared.begin_attempt();
    }
    match process.monitor().execute(Migrate { uri, resume: None }).await {
        Ok(_) => {
            see_it_begin(lane, &process).await;
            accepted(lane);
            Ok(Outcome::default())
        }
        Err(error) => {
            if error.refused().is_some()
                && let Some(sent) = lane.record.outgoing_mut()
            {
                sent.issue = Issue::Refused;
                lane.persist().await?;
            }
            Err(CommandError::failed("begin to send", &error))
        }
    }
}

/// Refuses where the guest is not this host's to send.
pub(super) fn check_owner(lane: &Lane, fence: &Fence) -> Result<(), CommandError> {
    let generation = match &lane.record.part {
        Part::Running { process, .. } => process.generation,
        Part::Absent | Part::Stopped { .. } | Part::Receiver { .. } => {
            return Err(CommandError::wrong_state("the VM does not run here"));
        }
    };
    if fence.generation != generation {
        return Err(CommandError::wrong_state(format!(
            "the guest runs here under generation {generation}, the command is of {}",
            fence.generation
        )));
    }
    match lane.record.unsettled_order() {
        Some(sent) if sent.migration != fence.migration => Err(CommandError::wrong_state(
            "the guest was handed over by an earlier migration, and that is not settled",
        )),
        Some(_) | None => Ok(()),
    }
}

/// Whether this transfer was begun before.
enum Begun {
    NotYet,
    /// Under way, or over: either is observed.
    Noted,
    /// QEMU took it, and the agent died before it could note that.
    Unnoted,
}

fn begun(lane: &Lane) -> Result<Begun, CommandError> {
    let Some(sent) = lane.record.outgoing() else { return Ok(Begun::NotYet) };
    match (&sent.order, sent.issue) {
        (Order::GaveUp { cause } | Order::TakenBack { cause }, _) => {
            Err(CommandError::GaveUp(cause.clone()))
        }
        (Order::Handed, _) | (Order::Open, Issue::Accepted) => Ok(Begun::Noted),
        (Order::Open, Issue::Intended | Issue::Refused) => {
            let sending = sending_of(Some(sent), &lane.shared.sight.borrow());
            Ok(if sending == Sending::Idle { Begun::NotYet } else { Begun::Unnoted })
        }
    }
}

/// Reads what QEMU says of the attempt that it just took, unless an event was faster.
async fn see_it_begin(lane: &Lane, process: &QemuProcess) {
    match process.monitor().execute(QueryMigrate {}).await {
        Ok(begun) => {
            lane.shared.sight.send_if_modified(|sight| {
                let first = sight.migrate.status.is_none();
                if first {
                    sight.migrate = begun;
                }
                first
            });
        }
        // The observer reads it again.
        Err(error) => tracing::debug!(%error, "the attempt was taken and not seen to begin"),
    }
}

/// Notes that QEMU took the command; seen at once, on the disk with the answer.
fn accepted(lane: &mut Lane) {
    if let Some(sent) = lane.record.outgoing_mut() {
        sent.issue = Issue::Accepted;
    }
    lane.shared.record.send_replace(std::sync::Arc::new(lane.record.clone()));
}

/// Reads where a receiver listens, as QEMU is told it.
pub(super) fn uri(field: &str, listener: Option<&v1::Listener>) -> Result<String, CommandError> {
    let listener = listener.ok_or_else(|| CommandError::invalid(field, "is missing"))?;
    let address = listener
        .address
        .parse::<std::net::IpAddr>()
        .map_err(|_| CommandError::invalid(format!("{field}.address"), "must be an IP address"))?;
    let port = u16::try_from(listener.port)
        .ok()
        .filter(|port| *port != 0)
        .ok_or_else(|| CommandError::invalid(format!("{field}.port"), "must be 1 to 65535"))?;
    Ok(format!("tcp:{}", std::net::SocketAddr::new(address, port)))
}

/// Sets up QEMU to send, and returns what it says of its last migration.
async fn prepare(
    process: &QemuProcess,
    policy: &v1::TransferPolicy,
    armed: &v1::Listener,
) -> Result<(vmferry_qmp::MigrateInfo, Carries), CommandError> {
    let monitor = process.monitor();
    let (before, offered) =
        tokio::try_join!(monitor.execute(QueryMigrate {}), describe::offered(monitor))
            .map_err(|error| CommandError::failed("read the last migration", &error))?;
    if !before.blocked_reasons.is_empty() {
        let blockers = before.blocked_reasons.iter().map(|reason| v1::Blocker {
            code: "qemu_blocked".to_owned(),
            message: reason.clone(),
            host_id: String::new(),
        });
        return Err(CommandError::Blocked(blockers.collect()));
    }
    if before.status.as_ref().is_some_and(|status| !status.settled()) {
        return Err(CommandError::wrong_state(format!(
            "QEMU is still busy with an earlier migration ({})",
            before.status.as_ref().map_or("", |status| status.label())
        )));
    }
    let throttling = throttling(policy);
    let chosen = capabilities::chosen(&[&offered], throttling);
    let carries = carries(process, policy, armed, &offered).await?;
    let chosen: Vec<&str> = chosen.into_iter().chain(carries.on().iter().copied()).collect();
    let throttle: &[&str] = match throttling {
        Throttling::AutoConverge => &[],
        Throttling::Off => &["auto-converge"],
    };
    let off: Vec<&str> = throttle
        .iter()
        .chain(carries.off())
        .copied()
        .filter(|name| offered.contains(*name))
        .collect();
    tokio::try_join!(
        monitor.execute(MigrateSetCapabilities::new(&chosen, &off)),
        monitor.execute(limits::parameters(tuned(policy), policy.downtime_limit_ms, carries))
    )
    .map_err(|error| CommandError::failed("set up the migration", &error))?;
    Ok((before, carries))
}

/// Says whether QEMU is set up to slow the guest down, now or later.
pub(super) const fn throttling(policy: &v1::TransferPolicy) -> Throttling {
    if policy.auto_converge || policy.may_throttle {
        Throttling::AutoConverge
    } else {
        Throttling::Off
    }
}

fn tuned(policy: &v1::TransferPolicy) -> Tuned {
    let throttle = match (policy.auto_converge, policy.may_throttle) {
        (true, _) => Throttle::On,
        (false, true) => Throttle::Ready,
        (false, false) => Throttle::Off,
    };
    Tuned { max_bandwidth: policy.max_bandwidth, throttle }
}

/// Says whether the guest may go before its memory: as its receiver was set up, unless its disks are
/// being copied.
async fn carries(
    process: &QemuProcess,
    policy: &v1::TransferPolicy,
    armed: &v1::Listener,
    offered: &std::collections::BTreeSet<String>,
) -> Result<Carries, CommandError> {
    let required = policy.postcopy() == v1::Postcopy::Required;
    let ours = Carries::of(&[offered]);
    let both = match (armed.postcopy, armed.preempt, ours) {
        (false, _, _) | (true, _, Carries::Whole) => Carries::Whole,
        (true, true, Carries::Preempt) => Carries::Preempt,
        (true, _, Carries::Postcopy) | (true, false, Carries::Preempt) => Carries::Postcopy,
    };
    if both == Carries::Whole {
        return if required {
            let message = "the ends of this move were not both set up for postcopy";
            Err(postcopy::refused("postcopy_unavailable", message))
        } else {
            Ok(both)
        };
    }
    let jobs = process
        .monitor()
        .execute_raw("query-block-jobs", serde_json::json!({}), crate::monitor::COMMAND_DEADLINE)
        .await
        .map_err(|error| CommandError::failed("look for copies of disks", &error))?;
    match jobs.as_array().filter(|jobs| !jobs.is_empty()) {
        None => Ok(both),
        Some(_) if !required => Ok(Carries::Whole),
        Some(jobs) => Err(postcopy::refused(
            "postcopy_disk_copy",
            format!(
                "{} disk jobs of this VM are under way: its disks must be whole where its guest goes; end them first",
                jobs.len()
            ),
        )),
    }
}
