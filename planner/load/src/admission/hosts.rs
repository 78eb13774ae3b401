//! Hosts that are only what they say.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail};
use prost::Message as _;
use prost::bytes::{BufMut as _, Bytes, BytesMut};
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use vmferry_proto::reporting::Reporting;
use vmferry_proto::v1;
use vmferry_types::{Millis, spread};

use crate::console::complain;

const GIB: u64 = 1 << 30;
const HOST_MEMORY: u64 = 512 * GIB;
const HOST_CPU_MILLI: u64 = 128_000;
const MACHINE: &str = "pc-q35-10.0";
/// So many hosts connect at once.
const CONNECTING: usize = 64;
/// How long the planner may take to answer a report.
const DEADLINE: Duration = Duration::from_secs(10);

/// All hosts.
pub(super) struct Hosts {
    all: Vec<Host>,
    heard: AtomicUsize,
    taken: AtomicU64,
    late: AtomicUsize,
}

struct Host {
    /// The last report but for its number and time, encoded.
    said: Mutex<Bytes>,
    /// What is said of VMs that came later.
    came: Mutex<Vec<v1::VmReport>>,
    changed: Notify,
    sequence: AtomicU64,
}

/// Returns a host's id.
pub(super) fn name(host: usize) -> String {
    format!("host-{host:05}")
}

/// Returns the address of a host's agent: one of the loopback's own, so that who is meant shows.
pub(super) fn address(host: usize) -> Ipv4Addr {
    let [.., a, b, c] = host.to_be_bytes();
    Ipv4Addr::new(127, a.wrapping_add(64), b, c)
}

/// Returns the host whose agent has an address.
pub(super) fn host_at(address: Ipv4Addr) -> usize {
    let [_, a, b, c] = address.octets();
    usize::from(a.wrapping_sub(64)) << 16 | usize::from(b) << 8 | usize::from(c)
}

/// Returns a VM's definition, of so many GiB.
pub(super) fn definition(name: &str, gib: u64) -> String {
    format!(
        "name = \"{name}\"\nmachine = \"{MACHINE}\"\naccel = \"kvm\"\ncpu = \"EPYC-Rome\"\nvcpus = 2\n\
         memory = \"{gib}GiB\"\nlabels = {{ tier = \"web\" }}\n\
         [[disk]]\npath = \"/shared/{name}.qcow2\"\nformat = \"qcow2\"\nshared = true\n\
         [[nic]]\nmac = \"52:54:00:12:34:56\"\nbridge = \"br0\"\n"
    )
}

impl Hosts {
    pub(super) fn new(hosts: u32, vms_per_host: u32, port: u16) -> Self {
        let all = (0..usize::try_from(hosts).unwrap_or(0))
            .map(|host| Host {
                said: Mutex::new(report(host, vms_per_host, port).encode_to_vec().into()),
                came: Mutex::new(Vec::new()),
                changed: Notify::new(),
                sequence: AtomicU64::new(0),
            })
            .collect();
        Self { all, heard: 0.into(), taken: 0.into(), late: 0.into() }
    }

    /// Counts a VM on a host from now on, and lets it say so at once.
    pub(super) fn arrived(&self, host: usize, vm: v1::VmReport) {
        let Some(host) = self.all.get(host) else { return };
        let mut said = host.said.lock().unwrap_or_else(PoisonError::into_inner);
        // Repeated fields of two encoded messages that are put together are put together.
        let more = v1::HostReport { vms: vec![vm.clone()], ..v1::HostReport::default() };
        let mut both = BytesMut::from(said.as_ref());
        both.put_slice(&more.encode_to_vec());
        *said = both.freeze();
        host.came.lock().unwrap_or_else(PoisonError::into_inner).push(vm);
        host.changed.notify_one();
    }

    /// Returns what is said of a VM that came later.
    pub(super) fn has(&self, host: usize, vm_id: &str) -> Option<v1::VmReport> {
        let came = self.all.get(host)?.came.lock().unwrap_or_else(PoisonError::into_inner);
        came.iter().find(|vm| vm.vm_id == vm_id).cloned()
    }

    pub(super) fn fresh_sequence(&self, host: usize) -> u64 {
        self.all.get(host).map_or(0, |host| host.sequence.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Returns how many reports were taken.
    pub(super) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Returns how many were answered only after the next was due.
    pub(super) fn late(&self) -> usize {
        self.late.load(Ordering::Relaxed)
    }

    /// Waits until each host was heard once.
    pub(super) async fn all_heard(&self, limit: Duration) -> Result<()> {
        let begun = Instant::now();
        loop {
            let heard = self.heard.load(Ordering::Relaxed);
            if heard == self.all.len() {
                self.late.store(0, Ordering::Relaxed);
                return Ok(());
            }
            if begun.elapsed() > limit {
                bail!("{heard} of {} hosts were heard within {limit:?}", self.all.len());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Returns a host's next report, encoded: what it said before, with a new number and time.
    fn next(&self, host: usize) -> Bytes {
        let sequence = self.fresh_sequence(host);
        let sent_at_ms = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_millis();
        let sent_at_ms = u64::try_from(sent_at_ms).unwrap_or(0);
        let head = v1::HostReport { sequence, sent_at_ms, ..v1::HostReport::default() };
        let said = self
            .all
            .get(host)
            .map(|host| host.said.lock().unwrap_or_else(PoisonError::into_inner).clone());
        let said = said.unwrap_or_default();
        let mut both = BytesMut::with_capacity(said.len() + 24);
        both.put_slice(&said);
        both.put_slice(&head.encode_to_vec());
        both.freeze()
    }
}

fn report(host: usize, vms: u32, port: u16) -> v1::HostReport {
    let vms: Vec<v1::VmReport> = (0..vms).map(|vm| vm_report(host, vm, vms)).collect();
    let used: u64 = vms.iter().map(|vm| vm.observed_memory_bytes).sum();
    let id = name(host);
    let list = |name: &str, count: u32| -> Vec<String> {
        (0..count).map(|at| format!("{name}-{}.{}", at / 3, at % 3)).collect()
    };
    let mut machine_types = list("pc-q35", 60);
    machine_types.push(MACHINE.to_owned());
    let mut cpu_models = list("Processor-Model-v1", 120);
    cpu_models.push("EPYC-Rome".to_owned());
    v1::HostReport {
        name: id.clone(),
        boot_id: format!("4d9f9a5e-0000-4000-8000-{host:012x}"),
        agent_instance: format!("6a1b9a5e-0000-4000-8000-{host:012x}"),
        agent_version: "0.1.0".to_owned(),
        agent_address: format!("{}:{port}", address(host)),
        capacity: Some(v1::Capacity {
            total_memory_bytes: HOST_MEMORY,
            available_memory_bytes: HOST_MEMORY.saturating_sub(used),
            cpu_total_milli: HOST_CPU_MILLI,
            memory_pressure: Some(0),
            cpu_pressure: Some(12),
            ..v1::Capacity::default()
        }),
        capabilities: Some(v1::HostCapabilities {
            architecture: "x86_64".to_owned(),
            qemu_version: "10.0.2".to_owned(),
            accelerators: vec!["kvm".to_owned(), "tcg".to_owned()],
            machine_types,
            bridges: vec!["br0".to_owned()],
            cpu_models,
            migration_address: address(host).to_string(),
            shared_paths: Some(v1::SharedPaths { paths: vec!["/shared".to_owned()] }),
            outbound_max: None,
        }),
        host_id: id,
        vms,
        ..v1::HostReport::default()
    }
}

/// What a host says of one of the VMs that are in the store from the start.
fn vm_report(host: usize, vm: u32, vms: u32) -> v1::VmReport {
    let number = host * usize::try_from(vms).unwrap_or(0) + usize::try_from(vm).unwrap_or(0);
    let name = format!("vm-{number}");
    let gib = 4 + u64::from(vm % 12);
    v1::VmReport {
        vm_id: format!("00000000-0000-4000-8000-{number:012x}"),
        role: "running".to_owned(),
        generation: 1,
        claim: 1,
        knowledge: v1::Knowledge::Known.into(),
        configured_memory_bytes: gib * GIB + (96 << 20),
        observed_memory_bytes: gib * GIB / 2,
        cpu_milli: 2_000,
        run_state: "running".to_owned(),
        migration_id: format!("01900000-0000-7000-8000-{number:012x}"),
        definition: definition(&name, gib),
        resolved_machine: MACHINE.to_owned(),
        ever_continued: true,
        vm_name: name,
        ..v1::VmReport::default()
    }
}

/// Lets every host report, each over a connection of its own, evenly spread over the interval.
pub(super) fn report_all(
    hosts: &Arc<Hosts>,
    planner: SocketAddr,
    interval: Duration,
    tasks: &mut JoinSet<()>,
) -> Result<()> {
    let endpoint = Endpoint::from_shared(format!("http://{planner}"))
        .context("read the planner's address")?
        .connect_timeout(Duration::from_secs(30))
        .tcp_nodelay(true);
    let connecting = Arc::new(Semaphore::new(CONNECTING));
    let count = u32::try_from(hosts.all.len()).unwrap_or(u32::MAX).max(1);
    let begun = Instant::now();
    for host in 0..hosts.all.len() {
        let (hosts, endpoint) = (Arc::clone(hosts), endpoint.clone());
        let connecting = Arc::clone(&connecting);
        let phase =
            interval.mul_f64(f64::from(u32::try_from(host).unwrap_or(0)) / f64::from(count));
        tasks.spawn(async move {
            tokio::time::sleep_until(begun + phase).await;
            let channel = {
                let _turn = connecting.acquire().await;
                endpoint.connect().await
            };
            match channel {
                Ok(channel) => keep_reporting(&hosts, host, channel, interval).await,
                Err(error) => complain(&format!("{}: {error}", name(host))),
            }
        });
    }
    Ok(())
}

async fn keep_reporting(hosts: &Hosts, host: usize, channel: Channel, interval: Duration) {
    let mut client = tonic::client::Grpc::new(channel);
    let mut call = None;
    let Some(own) = hosts.all.get(host) else { return };
    let mut due = Instant::now();
    let period = Millis(u64::try_from(interval.as_millis()).unwrap_or(u64::MAX));
    let (who, mut turn) = (name(host), 0);
    let mut first = true;
    loop {
        match tell(&mut client, &mut call, hosts.next(host)).await {
            Ok(reply) if reply.refused.is_empty() => {
                hosts.taken.fetch_add(1, Ordering::Relaxed);
                if std::mem::take(&mut first) {
                    hosts.heard.fetch_add(1, Ordering::Relaxed);
                }
            }
            Ok(reply) => complain(&format!("{}: {}", name(host), reply.refused)),
            Err(status) => complain(&format!("{}: {status}", name(host))),
        }
        // As agents do, so that a crowd does not stay one.
        turn += 1;
        due += Duration::from_millis(spread(period, &who, turn).value());
        let now = Instant::now();
        if due < now {
            hosts.late.fetch_add(1, Ordering::Relaxed);
            due = now;
        }
        tokio::select! {
            () = tokio::time::sleep_until(due) => {}
            () = own.changed.notified() => {}
        }
    }
}

/// Sends a report over the call that is kept, or a new one.
async fn tell(
    client: &mut tonic::client::Grpc<Channel>,
    kept: &mut Option<Reporting<Bytes>>,
    report: Bytes,
) -> Result<v1::ReportReply, Status> {
    const PATH: PathAndQuery = PathAndQuery::from_static("/vmferry.v1.Planner/Report");
    let call = match kept.take() {
        Some(call) => call,
        None => {
            client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            Reporting::open(DEADLINE, |reports| {
                client.streaming(tonic::Request::new(reports), PATH, Encoded)
            })
            .await?
        }
    };
    let (reply, call) = call.send(report).await?;
    *kept = Some(call);
    Ok(reply)
}

/// Sends what is encoded already.
#[derive(Clone, Copy, Debug)]
struct Encoded;

impl Codec for Encoded {
    type Encode = Bytes;
    type Decode = v1::ReportReply;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Encoded {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, target: &mut EncodeBuf<'_>) -> Result<(), Status> {
        target.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Encoded {
    type Item = v1::ReportReply;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<v1::ReportReply>, Status> {
        let reply = v1::ReportReply::decode(source);
        reply.map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_known_by_its_address() {
        for host in [0, 1, 255, 256, 9_999, 70_000] {
            assert_eq!(host_at(address(host)), host);
        }
    }

    #[test]
    fn an_encoded_report_is_put_together_with_its_number_and_what_came() {
        let hosts = Hosts::new(2, 3, 9);
        let vm = v1::VmReport { vm_id: "new".into(), ..v1::VmReport::default() };
        hosts.arrived(1, vm);
        let report = v1::HostReport::decode(hosts.next(1)).expect("it is a report");
        assert_eq!((report.host_id.as_str(), report.sequence), ("host-00001", 1));
        assert_eq!(report.vms.len(), 4);
        assert!(report.sent_at_ms > 0 && hosts.has(1, "new").is_some());
    }
}
