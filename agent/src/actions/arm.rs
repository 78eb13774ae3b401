//! Arming a receiver.

use std::collections::BTreeSet;

use vmferry_agent_core::argv::Purpose;
use vmferry_agent_core::capabilities::{self, Carries};
use vmferry_agent_core::compare;
use vmferry_agent_core::definition::Definition;
use vmferry_agent_core::journal::{Arrival, Continued, Defined, GoneKind, Incoming, Part};
use vmferry_proto::v1;
use vmferry_qmp::command::{MigrateIncoming, MigrateSetCapabilities, MigrateSetParameters};
use vmferry_types::Fence;

use super::{Outcome, end, launch, postcopy, protect, start, transfer};
use crate::error::{CommandError, chain};
use crate::lane::Lane;
use crate::monitor::MonitorError;
use crate::process::QemuProcess;
use crate::{check, describe};

/// How many ports are tried before it is said that there is none.
const PORT_TRIES: usize = 8;

/// What is already there for this migration.
enum Armed {
    /// A receiver that listens.
    Listening(v1::Listener),
    /// A receiver that does not listen yet: the agent died in between.
    Unfinished,
    /// Nothing.
    Nothing,
}

pub(super) async fn run(
    lane: &mut Lane,
    fence: &Fence,
    arm: v1::ArmReceiver,
) -> Result<Outcome, CommandError> {
    let source =
        arm.source.ok_or_else(|| CommandError::invalid("arm_receiver.source", "is missing"))?;
    let policy = arm.policy.unwrap_or_default();
    let vm = start::parse(&source.definition, fence)?;
    match armed(lane, fence)? {
        Armed::Listening(listener) => return Ok(listening(listener)),
        Armed::Unfinished | Armed::Nothing => {}
    }
    lane.check_journal()?;
    check::alone(&lane.agent, fence.vm).await?;
    let blockers = check::receivable(&lane.agent, &vm, &source).await;
    if !blockers.is_empty() {
        return Err(CommandError::Blocked(blockers));
    }
    // What an earlier launch left is gone, or never listened: it makes room for a new one.
    if lane.record.process().is_some() {
        let gone = end::end_process(lane).await?;
        end::note_end(lane, &gone, Part::Absent);
    }
    lane.record.name.clone_from(&vm.name);
    lane.record.part = Part::Receiver {
        defined: Defined {
            text: source.definition.clone(),
            resolved_machine: source.resolved_machine.clone(),
        },
        process: launch::plan(lane, fence, &vm),
        incoming: Incoming {
            migration: fence.migration,
            port: None,
            carries: Carries::Whole,
            arrives: Arrival::Streamed,
            cont: Continued::Never,
        },
    };
    lane.persist().await?;
    let process = match launch::launch(lane, &vm, Purpose::Receive).await {
        Ok(process) => process,
        Err(Ok(failed)) => {
            end::note_end(lane, &failed.gone, Part::Absent);
            lane.persist().await?;
            return Err(failed.error);
        }
        Err(Err(unproven)) => {
            lane.observe(None);
            return Err(unproven);
        }
    };
    start::note_identity(lane, &process);
    match listen(lane, &process, &source, &policy, &vm).await {
        Ok((port, carries)) => {
            if let Part::Receiver { incoming, .. } = &mut lane.record.part {
                incoming.port = Some(port);
                incoming.carries = carries;
            }
            lane.observe(Some(process));
            Ok(listening(listener(lane, port, carries)))
        }
        Err(error) => {
            drop(process);
            let gone = end::end_process(lane).await?;
            end::note_end(lane, &gone, Part::Absent);
            lane.persist().await?;
            Err(error)
        }
    }
}

fn listening(listener: v1::Listener) -> Outcome {
    Outcome { listener: Some(listener), ..Outcome::default() }
}

fn listener(lane: &Lane, port: u16, carries: Carries) -> v1::Listener {
    v1::Listener {
        address: lane.agent.config.migration_address.to_string(),
        port: u32::from(port),
        postcopy: carries != Carries::Whole,
        preempt: carries == Carries::Preempt,
        doorbell: 0,
    }
}

/// Says what is there of this receiver, and refuses where something else is.
fn armed(lane: &Lane, fence: &Fence) -> Result<Armed, CommandError> {
    let gone = lane.shared.sight.borrow().gone.clone();
    match &lane.record.part {
        Part::Absent | Part::Stopped { .. } => Ok(Armed::Nothing),
        // A VM whose process is proven gone may come back from elsewhere.
        Part::Running { .. } if gone.is_some() => Ok(Armed::Nothing),
        Part::Running { .. } => Err(CommandError::wrong_state("the VM runs here")),
        Part::Receiver { incoming, .. } => match (incoming.migration == fence.migration, gone) {
            (true, None) => Ok(match incoming.port {
                Some(port) => Armed::Listening(listener(lane, port, incoming.carries)),
                None => Armed::Unfinished,
            }),
            (true, Some(gone))
                if incoming.port.is_none() || gone.kind == GoneKind::NeverStarted =>
            {
                Ok(Armed::Nothing)
            }
            (true, Some(gone)) => {
                Err(CommandError::ReceiverGone(format!("{} {}", gone.ended, gone.stderr_tail)))
            }
            (false, Some(_)) => Ok(Armed::Nothing),
            (false, None) => Err(CommandError::wrong_state(format!(
                "a receiver of migration {} is armed here; destroy it first",
                incoming.migration
            ))),
        },
    }
}

/// Makes a launched receiver listen, once it is known to be built like the source.
async fn listen(
    lane: &Lane,
    process: &QemuProcess,
    source: &v1::SourceDescription,
    policy: &v1::TransferPolicy,
    vm: &Definition,
) -> Result<(u16, Carries), CommandError> {
    let offered: BTreeSet<String> = source.capabilities.iter().cloned().collect();
    let throttling = transfer::throttling(policy);
    let ours = &lane.agent.probe.migration_capabilities;
    let chosen = capabilities::chosen(&[&offered, ours], throttling);
    let carries = Carries::of(&[&offered, ours]);
    let capabilities = set_up(process, &chosen, carries, policy.postcopy());
    let announcements =
        async {
            process.monitor().execute(announcements()).await.map_err(|error| {
                CommandError::failed("set up the announcement of the guest", &error)
            })
        };
    let defined = lane.record.defined().map(|defined| defined.resolved_machine.as_str());
    let shape = describe::shape(process, vm, defined.unwrap_or_default());
    let (carries, _, shape) = tokio::try_join!(capabilities, announcements, shape)?;
    let differences = compare::differences(&describe::shape_of(source), &shape);
    if !differences.is_empty() {
        let host_id = lane.agent.config.host_id.to_string();
        let blockers = differences
            .into_iter()
            .map(|found| v1::Blocker {
                code: found.code.to_owned(),
                message: found.message,
                host_id: host_id.clone(),
            })
            .collect();
        return Err(CommandError::Blocked(blockers));
    }
    protect::receiver(lane, process, &source.tls_host).await?;
    Ok((bind(lane, process).await?, carries))
}

/// Turns capabilities on; returns whether the guest may come before its memory.
///
/// What that needs of the host and of the guest's memory, QEMU knows best: userfaultfd, and memory
/// that can be filled page by page.
async fn set_up(
    process: &QemuProcess,
    chosen: &[&'static str],
    carries: Carries,
    asked: v1::Postcopy,
) -> Result<Carries, CommandError> {
    let set = async |carries: Carries| {
        let all: Vec<&str> = chosen.iter().chain(carries.on()).copied().collect();
        process.monitor().execute(MigrateSetCapabilities::new(&all, &[])).await
    };
    let refused = match (asked, carries) {
        (v1::Postcopy::Off, _) => None,
        (v1::Postcopy::Allowed | v1::Postcopy::Required, Carries::Whole) => {
            Some("not both QEMUs have the migration capability postcopy-ram".to_owned())
        }
        (v1::Postcopy::Allowed | v1::Postcopy::Required, Carries::Postcopy | Carries::Preempt) => {
            match set(carries).await {
                Ok(_) => return Ok(carries),
                Err(error) if error.refused().is_some() => Some(chain(&error)),
                Err(error) => {
                    return Err(CommandError::failed("set migration capabilities", &error));
                }
            }
        }
    };
    match refused {
        Some(cause) if asked == v1::Postcopy::Required => Err(postcopy::refused(
            "postcopy_unavailable",
            format!(
                "this host cannot take a guest before its memory: {cause}; it needs userfaultfd (root, CAP_SYS_PTRACE, /dev/userfaultfd or vm.unprivileged_userfaultfd=1) and memory that is anonymous, in tmpfs or in huge pages"
            ),
        )),
        Some(cause) => {
            tracing::info!(cause, "postcopy cannot be turned to");
            whole(set(Carries::Whole).await)
        }
        None => whole(set(Carries::Whole).await),
    }
}

fn whole<T>(set: Result<T, MonitorError>) -> Result<Carries, CommandError> {
    set.map(|_| Carries::Whole)
        .map_err(|error| CommandError::failed("set migration capabilities", &error))
}

/// How the guest is made known to the switches once it goes on: five times within a second, since
/// one frame may be lost.
fn announcements() -> MigrateSetParameters {
    MigrateSetParameters::default()
        .with("announce-initial", 50)
        .with("announce-max", 550)
        .with("announce-rounds", 5)
        .with("announce-step", 100)
}

/// Makes QEMU listen on a port that nobody has.
///
/// Whether one is free is tried by binding it, here: a QEMU that was refused one takes no other
/// any more, and a connection to a receiver's port would end it.
async fn bind(lane: &Lane, process: &QemuProcess) -> Result<u16, CommandError> {
    let mut taken = None;
    for _ in 0..PORT_TRIES {
        let Some(port) = lane.agent.take_port() else { break };
        let address = std::net::SocketAddr::new(lane.agent.config.migration_address, port);
        if let Err(error) = std::net::TcpListener::bind(address) {
            lane.agent.give_port_back(port);
            taken = Some(format!("bind {address}: {error}"));
            continue;
        }
        let incoming =
            MigrateIncoming { uri: format!("tcp:{address}"), exit_on_error: Some(false) };
        return process.monitor().execute(incoming).await.map(|_| port).map_err(|error| {
            lane.agent.give_port_back(port);
            CommandError::failed("make the receiver listen", &error)
        });
    }
    Err(CommandError::Failed {
        operation: "make the receiver listen",
        cause: taken.unwrap_or_else(|| {
            "every port of migration.ports is in use; widen the range".to_owned()
        }),
    })
}
