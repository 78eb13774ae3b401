//! Asks planners for migrations, as people and programs do, until one of them says yes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use tokio::sync::Mutex;
use tonic::Code;
use tonic::transport::Endpoint;
use vmferry_proto::v1::planner_client::PlannerClient;
use vmferry_proto::v1::{CancelMigrationRequest, ErrorDetail, MigrateVmRequest};

use crate::dice::Dice;
use crate::fleet::fresh_request;
use crate::rest;

/// How long one call may take.
const BOUND: Duration = Duration::from_secs(10);
/// A host that refuses so often is not asked for any more.
const INSIST: u32 = 4;

/// Where a planner is asked.
#[derive(Clone, Copy, Debug)]
pub struct Door {
    /// gRPC.
    pub grpc: SocketAddr,
    /// REST.
    pub rest: SocketAddr,
}

/// What is asked for: VMs by name, and hosts that may be named as destinations.
#[derive(Clone, Debug)]
pub struct Wishes {
    /// One migration each, in this order.
    pub vms: Vec<String>,
    /// Names of hosts.
    pub hosts: Vec<String>,
}

/// How asking went.
#[derive(Debug, Default)]
pub struct Asked {
    /// Migrations accepted.
    pub accepted: AtomicU64,
    /// Calls that nobody answered: the planner was away.
    pub unanswered: AtomicU64,
    /// Calls that were refused, and asked again.
    pub refused: AtomicU64,
    /// Cancels asked for.
    pub cancels: AtomicU64,
    /// Refusals, by code.
    pub reasons: Mutex<BTreeMap<String, u64>>,
}

/// A planner's no.
enum No {
    /// Nobody answered.
    Away,
    /// It was refused, in the planner's words.
    Refused(String),
}

/// Asks for migrations through the doors of several planners.
#[derive(Debug)]
pub struct Caller {
    doors: Vec<Door>,
    dice: Mutex<Dice>,
    last_refusal: Mutex<String>,
    /// How it went so far.
    pub asked: Asked,
}

impl Caller {
    /// Makes a caller.
    #[must_use]
    pub fn new(doors: Vec<Door>, seed: u64) -> Arc<Self> {
        let dice = Mutex::new(Dice::new(seed, "caller"));
        Arc::new(Self { doors, dice, last_refusal: Mutex::default(), asked: Asked::default() })
    }

    /// Returns the last refusal, for people.
    pub async fn last_refusal(&self) -> String {
        self.last_refusal.lock().await.clone()
    }

    async fn door(&self) -> Option<Door> {
        let at = self.dice.lock().await.index(self.doors.len());
        self.doors.get(at).copied()
    }

    /// Asks for all wishes, `at_once` at a time, until each is accepted; returns their ids.
    ///
    /// # Errors
    ///
    /// Fails if the same request led to two migrations.
    pub async fn ask_for(self: &Arc<Self>, wishes: &Wishes, at_once: usize) -> Result<Vec<String>> {
        use futures::stream::{StreamExt as _, TryStreamExt as _};
        let hosts = &wishes.hosts;
        futures::stream::iter(wishes.vms.iter())
            .map(async |vm| self.ask_until_accepted(vm, hosts).await)
            .buffer_unordered(at_once)
            .try_collect()
            .await
    }

    async fn ask_until_accepted(&self, vm: &str, hosts: &[String]) -> Result<String> {
        let mut asked = self.draw(vm, hosts).await;
        let mut refusals = 0;
        let id = loop {
            let Some(door) = self.door().await else { bail!("there is no planner to ask") };
            match self.ask(door, &asked).await {
                Ok(id) => break id,
                Err(No::Away) => {
                    self.asked.unanswered.fetch_add(1, Ordering::Relaxed);
                }
                Err(No::Refused(why)) => {
                    self.asked.refused.fetch_add(1, Ordering::Relaxed);
                    *self.last_refusal.lock().await = format!("{vm}: {why}");
                    refusals += 1;
                    if refusals == INSIST {
                        asked.target_host.clear();
                        asked.request_id = fresh_request();
                    }
                }
            }
            let pause = self.dice.lock().await.millis(100, 600);
            tokio::time::sleep(pause).await;
        };
        self.asked.accepted.fetch_add(1, Ordering::Relaxed);
        let (again, cancel) = {
            let mut dice = self.dice.lock().await;
            (dice.chance(200), dice.chance(60))
        };
        if again
            && let Some(door) = self.door().await
            && let Ok(other) = self.ask(door, &asked).await
            && other != id
        {
            bail!("request {} led to migration {id} and to {other}", asked.request_id);
        }
        if cancel {
            self.cancel(&id).await;
        }
        Ok(id)
    }

    /// Draws what is asked for: mostly live, to wherever there is room.
    async fn draw(&self, vm: &str, hosts: &[String]) -> MigrateVmRequest {
        let mut dice = self.dice.lock().await;
        let named = dice.chance(250).then(|| hosts.get(dice.index(hosts.len())).cloned());
        let (method, downgrade) = match dice.below(10) {
            0 => ("snapshot", ""),
            1..=4 => ("", "snapshot"),
            _ => ("", ""),
        };
        MigrateVmRequest {
            vm_name: vm.to_owned(),
            target_host: named.flatten().unwrap_or_default(),
            method: method.to_owned(),
            downgrade: downgrade.to_owned(),
            request_id: fresh_request(),
            ..MigrateVmRequest::default()
        }
    }

    async fn ask(&self, door: Door, asked: &MigrateVmRequest) -> Result<String, No> {
        let by_rest = self.dice.lock().await.chance(500);
        let told = if by_rest {
            ask_by_rest(door.rest, asked).await
        } else {
            ask_by_grpc(door, asked.clone()).await
        };
        if let Err(No::Refused(why)) = &told {
            // The code comes first, in either form.
            let code: String = why.chars().take_while(|of| *of != ':').collect();
            *self.asked.reasons.lock().await.entry(code).or_default() += 1;
        }
        told
    }

    /// Asks to take a migration back at some time; it may well be too late.
    async fn cancel(&self, id: &str) {
        let wait = self.dice.lock().await.millis(0, 2_500);
        tokio::time::sleep(wait).await;
        let Some(door) = self.door().await else { return };
        self.asked.cancels.fetch_add(1, Ordering::Relaxed);
        if let Some(mut client) = client(door).await {
            let asked = CancelMigrationRequest { id: id.to_owned() };
            drop(tokio::time::timeout(BOUND, client.cancel_migration(asked)).await);
        }
    }
}

async fn client(door: Door) -> Option<PlannerClient<tonic::transport::Channel>> {
    let endpoint = Endpoint::from_shared(format!("http://{}", door.grpc)).ok()?;
    let channel = endpoint.connect_timeout(BOUND).timeout(BOUND).connect().await.ok()?;
    Some(PlannerClient::new(channel))
}

async fn ask_by_grpc(door: Door, asked: MigrateVmRequest) -> Result<String, No> {
    let mut client = client(door).await.ok_or(No::Away)?;
    match client.migrate_vm(asked).await {
        Ok(told) => Ok(told.into_inner().id),
        Err(status) => match status.code() {
            Code::Unavailable | Code::Cancelled | Code::Unknown | Code::DeadlineExceeded => {
                Err(No::Away)
            }
            Code::Ok
            | Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::ResourceExhausted
            | Code::FailedPrecondition
            | Code::Aborted
            | Code::OutOfRange
            | Code::Unimplemented
            | Code::Internal
            | Code::DataLoss
            | Code::Unauthenticated => {
                let detail = <ErrorDetail as prost::Message>::decode(status.details());
                let code = detail.map(|detail| detail.code).unwrap_or_default();
                Err(No::Refused(format!("{code}: {:?} {}", status.code(), status.message())))
            }
        },
    }
}

async fn ask_by_rest(address: SocketAddr, asked: &MigrateVmRequest) -> Result<String, No> {
    let body = serde_json::to_value(asked).map_err(|error| No::Refused(error.to_string()))?;
    let answer = rest::request(address, "POST", "/api/migrations", Some(&body)).await;
    let (status, told) = answer.map_err(|_| No::Away)?;
    match told.get("id").and_then(Value::as_str) {
        Some(id) if status < 300 => Ok(id.to_owned()),
        Some(_) | None => {
            let code = told.get("code").and_then(Value::as_str).unwrap_or("none");
            Err(No::Refused(format!("{code}: {status} {told}")))
        }
    }
}

/// Reads a list from a planner: the array under `key`.
///
/// # Errors
///
/// Fails if the planner does not answer with one.
pub async fn list(door: Door, path: &str, key: &str) -> Result<Vec<Value>> {
    let (status, told) = rest::request(door.rest, "GET", path, None).await?;
    let found = told.get(key).and_then(Value::as_array).cloned();
    found.with_context(|| format!("GET {path} answered {status}: {told}"))
}
