//! Hosts that are dead, by somebody's word or deed.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tracing::{error, warn};
use vmferry_planner_core::migration::Blocker;
use vmferry_proto::v1;
use vmferry_types::{HostId, Millis, Timestamp};

use super::ApiError;
use crate::agents::AgentError;
use crate::clock;
use crate::fence::{Fence, Fenced};
use crate::planner::{Planner, millis};
use crate::store::{Declaration, DeclarationKind, Declared, Sharing};

/// What whoever declares a host dead has to have done.
const CONFIRMATION: &str = "i-have-powered-it-off";
/// A controller may say that it switched a machine off a moment before the machine is.
const ASKED_AFTER_FENCE: u32 = 5;
const ASKED_EVERY: Duration = Duration::from_secs(1);
/// A reason is a sentence or two.
const TEXT_BYTES_MAX: usize = 2000;

impl Planner {
    /// Takes an operator's word that a host is powered off.
    ///
    /// # Errors
    ///
    /// Refuses it while the host's agent answers, and without the confirmation.
    pub async fn declare_host_dead(
        self: &Arc<Self>,
        asked: v1::DeclareHostDeadRequest,
    ) -> Result<v1::Host, ApiError> {
        let host = self.resolve_host("host", &asked.host)?;
        if asked.confirmation != CONFIRMATION {
            return Err(ApiError::Invalid {
                field: "confirmation",
                problem: format!(
                    "has to be \"{CONFIRMATION}\": a host that runs on while its VMs are started elsewhere damages their disks, so switch its power off and make sure of it first"
                ),
            });
        }
        let reason = text("reason", &asked.reason)?;
        if reason.is_empty() {
            return Err(ApiError::Invalid {
                field: "reason",
                problem: "is missing: say what happened to the host".to_owned(),
            });
        }
        let by = text("by", &asked.by)?;
        let said = Said { by, reason, kind: DeclarationKind::Operator, evidence: String::new() };
        self.declare(&host, said, 1).await?;
        self.get_host(host.as_str()).await
    }

    /// Runs the fence command; if it succeeds, the host is declared dead.
    ///
    /// # Errors
    ///
    /// Fails if there is no command, if it fails or hangs, or if the host's agent answers after it.
    pub async fn fence_host(
        self: &Arc<Self>,
        asked: v1::FenceHostRequest,
    ) -> Result<v1::Host, ApiError> {
        let host = self.resolve_host("host", &asked.host)?;
        let by = text("by", &asked.by)?;
        let Some(fence) = self.parts.config.fence.clone() else {
            return Err(blocked(
                &host,
                "no_fence_command",
                format!(
                    "no fence command is configured: write [fence] command = [\"/path\", \"{{host}}\"] in planner.toml, or power host {host} off by hand and declare it dead"
                ),
            ));
        };
        // A caller that goes away must not break the command off half-way.
        let (done, outcome) = oneshot::channel();
        let planner = Arc::clone(self);
        let of = host.clone();
        self.parts.shutdown.spawn(async move {
            let fenced = planner.run_fence(&of, &fence, by).await;
            if let Err(error) = done.send(fenced) {
                warn!(host_id = %of, outcome = ?error, "whoever asked for the fence has gone");
            }
        });
        match outcome.await {
            Ok(fenced) => fenced?,
            Err(_) => {
                return Err(blocked(
                    &host,
                    "shutting_down",
                    format!(
                        "this planner ended while host {host} was being fenced: nothing was declared"
                    ),
                ));
            }
        }
        self.get_host(host.as_str()).await
    }

    async fn run_fence(&self, host: &HostId, fence: &Fence, by: String) -> Result<(), ApiError> {
        warn!(host_id = %host, by, "fence command runs");
        match fence.run(host).await {
            Fenced::Succeeded { output } => {
                let reason = "the fence command succeeded".to_owned();
                let kind = DeclarationKind::FenceCommand;
                let said = Said { by, reason, kind, evidence: output };
                self.declare(host, said, ASKED_AFTER_FENCE).await
            }
            Fenced::Failed { how, output } => {
                error!(host_id = %host, how, output, "fence command failed: it proves nothing");
                Err(ApiError::FenceFailed { host: host.clone(), how, output })
            }
        }
    }

    /// Writes a declaration, unless the host's agent answers.
    async fn declare(&self, host: &HostId, said: Said, looks: u32) -> Result<(), ApiError> {
        // A command that switched it off says more than a report from before.
        let patience = match said.kind {
            DeclarationKind::Operator => millis(self.parts.config.policy.report_max_age),
            DeclarationKind::FenceCommand => Millis::ZERO,
        };
        let began = self.lease_clock().await?;
        self.silent(host, looks).await?;
        self.silent_for_all(host, Timestamp(began.value().saturating_sub(patience.value())))
            .await?;
        let store = self.store();
        self.parts.inventory.reread(store).await?;
        let boot_id = self.parts.inventory.row(host).map(|row| row.boot_id).unwrap_or_default();
        if boot_id.is_empty() {
            return Err(blocked(
                host,
                "boot_unknown",
                format!(
                    "host {host} never said which boot it runs: there is nothing to declare dead"
                ),
            ));
        }
        let Said { by, reason, kind, evidence } = said;
        let at = clock::now();
        let declaration = Declaration { boot_id, at, by, kind, reason, evidence, void: None };
        match store.declare_dead(host, &declaration).await? {
            Declared::Written { lost } => {
                warn!(host_id = %host, boot_id = declaration.boot_id, by = declaration.by,
                    reason = declaration.reason, kind = kind.label(), lost = lost.len(),
                    "host declared dead");
            }
            Declared::UnknownHost => {
                return Err(ApiError::NotFound { kind: "host", name: host.to_string() });
            }
            Declared::Rebooted { boot_id } => {
                return Err(blocked(
                    host,
                    "host_rebooted",
                    format!(
                        "host {host} has reported from another boot ({boot_id}) meanwhile: it lives"
                    ),
                ));
            }
        }
        self.parts.inventory.reread(store).await?;
        self.wake.notify_one();
        Ok(())
    }

    /// Makes sure that no other planner has heard a host since: the way from this one may be broken.
    async fn silent_for_all(&self, host: &HostId, since: Timestamp) -> Result<(), ApiError> {
        if self.store().sharing() == Sharing::Alone {
            return Ok(());
        }
        let heard = self.store().heard_by_another(host, &self.owner).await?;
        let Some(at) = heard.filter(|at| *at > since) else { return Ok(()) };
        let ago = self.lease_clock().await?.since(at).value() / 1000;
        let age = humantime::format_duration(self.parts.config.policy.report_max_age);
        Err(blocked(
            host,
            "host_heard",
            format!(
                "another planner heard host {host} {ago} s ago: it may live, and only the way from here be broken. Nothing was declared. Power it off, and say so again once nobody has heard it for {age}"
            ),
        ))
    }

    /// Makes sure that a host's agent does not answer, and that the host was not heard meanwhile.
    async fn silent(&self, host: &HostId, looks: u32) -> Result<(), ApiError> {
        let mut look = 0;
        loop {
            look += 1;
            let began = clock::now();
            let answer = self.parts.agents.report(host).await;
            let heard = self.parts.inventory.heard(host).is_some_and(|heard| heard.at >= began);
            let silent = matches!(answer, Err(AgentError::Unreachable { .. })) && !heard;
            if silent {
                return Ok(());
            }
            if look >= looks {
                return Err(blocked(
                    host,
                    "host_answers",
                    format!(
                        "the agent of host {host} answers: the host is not dead, and nothing was declared. Power it off first"
                    ),
                ));
            }
            tokio::time::sleep(ASKED_EVERY).await;
        }
    }
}

/// What a declaration says beside the boot and the time.
struct Said {
    by: String,
    reason: String,
    kind: DeclarationKind,
    evidence: String,
}

fn blocked(host: &HostId, code: &str, message: String) -> ApiError {
    let blocker = Blocker { code: code.to_owned(), message, host: Some(host.clone()) };
    ApiError::Blocked { blockers: vec![blocker] }
}

/// Takes a line for people as it is, if it is one.
pub(super) fn text(field: &'static str, text: &str) -> Result<String, ApiError> {
    if text.len() > TEXT_BYTES_MAX {
        let problem = format!("is longer than {TEXT_BYTES_MAX} bytes");
        return Err(ApiError::Invalid { field, problem });
    }
    if text.chars().any(|c| c.is_control() && c != '\n') {
        return Err(ApiError::Invalid { field, problem: "has control characters".to_owned() });
    }
    Ok(text.trim().to_owned())
}
