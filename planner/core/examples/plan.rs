//! Measures a plan: one host with 200 VMs is emptied into a fleet of 20 VMs a host.
//!
//! ```text
//! plan HOSTS    prints {"hosts":…,"vms":…,"ms":…,"peak_mib":…}
//! ```
//!
//! The time is the median of several plans. The memory is the process's greatest, the fleet
//! included, so each size wants a process of its own.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for people")]
#![expect(clippy::disallowed_methods, clippy::disallowed_types, reason = "it measures time")]

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmferry_planner_core::fleet::{
    Availability, Capabilities, Cordon, Demand, Fleet, Host, HostPolicy, Lifecycle, Policy, Report,
    VmUse,
};
use vmferry_planner_core::maintenance::{
    Crossing, Live, Order, PinsToSource, Strategy, Workload, plan,
};
use vmferry_planner_core::placement::Needs;
use vmferry_types::{Bytes, HostId, MilliCpu, Millis, Percent, Role, Timestamp, VmId};

const VMS_PER_HOST: u64 = 20;
const VMS_TO_MOVE: u64 = 200;
const ROUNDS: usize = 5;
const NOW: Timestamp = Timestamp(1_000_000);
const MIB: u64 = 1 << 20;

fn main() -> ExitCode {
    let Some(hosts) = std::env::args().nth(1).and_then(|text| text.parse().ok()) else {
        eprintln!("plan: how many hosts?");
        return ExitCode::from(2);
    };
    let Some(mut fleet) = fleet(hosts) else {
        eprintln!("plan: so many hosts have no names");
        return ExitCode::from(2);
    };
    let Some(source) = fleet.hosts.keys().next().cloned() else { return ExitCode::from(2) };
    let workloads = workloads(&source);
    fill(&mut fleet, &source, &workloads);
    let order = Order {
        source,
        strategy: Strategy::PreferLive,
        crossing: Crossing::Refused,
        pins: PinsToSource::Hold,
    };
    let mut times: Vec<Duration> = Vec::new();
    let mut placed = 0;
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        let made = plan(&fleet, &order, &workloads);
        times.push(Instant::now().duration_since(begun));
        placed = made.assignments.len();
    }
    times.sort();
    let ms = times[ROUNDS / 2].as_secs_f64() * 1_000.0;
    let vms = hosts * VMS_PER_HOST;
    let peak = peak_mib();
    eprintln!("plan: {placed} of {VMS_TO_MOVE} VMs placed");
    println!(r#"{{"hosts":{hosts},"vms":{vms},"ms":{ms:.1},"peak_mib":{peak}}}"#);
    ExitCode::SUCCESS
}

/// Returns the greatest memory of this process. 0 where the kernel does not say.
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).div_ceil(1024)
}

/// A plain sequence without randomness: sizes that differ from host to host and VM to VM.
fn spread(seed: u64, of: u64) -> u64 {
    seed.wrapping_mul(6_364_136_223_846_793_005).rotate_left(23) % of
}

/// Hosts of three kinds; every tenth is cordoned, every seventh is of another cluster.
fn fleet(count: u64) -> Option<Fleet> {
    let kinds: Vec<Arc<Capabilities>> = (0..3).map(|kind| Arc::new(capabilities(kind))).collect();
    let hosts: Option<BTreeMap<HostId, Host>> = (0..count)
        .map(|at| {
            let id: HostId = format!("host-{at:05}").parse().ok()?;
            Some((id.clone(), host(id, at, &kinds)))
        })
        .collect();
    Some(Fleet {
        now: NOW,
        policy: Policy {
            reserve_memory: Percent::new(10)?,
            reserve_cpu: Percent::new(0)?,
            cpu_overcommit_percent: 100,
            report_max_age: Millis(30_000),
            inbound_max: 2,
            outbound_max: 2,
        },
        hosts: hosts?,
    })
}

fn capabilities(kind: u32) -> Capabilities {
    let list = |name: &str, count: u32| -> BTreeSet<String> {
        (0..count).map(|at| format!("{name}-{at}.{kind}")).collect()
    };
    let mut machine_types = list("pc-q35", 60);
    machine_types.insert("pc-q35-10.0".into());
    let mut cpu_models = list("Model", 120);
    cpu_models.insert("qemu64".into());
    Capabilities {
        architecture: "x86_64".into(),
        accelerators: BTreeSet::from(["kvm".into(), "tcg".into()]),
        machine_types,
        cpu_models,
        bridges: BTreeSet::from(["br0".into(), "br1".into()]),
        qemu_version: "10.0.2".into(),
        shared_paths: None,
    }
}

fn host(id: HostId, at: u64, kinds: &[Arc<Capabilities>]) -> Host {
    let total = 384 * 1024 * MIB;
    let vms: BTreeMap<VmId, VmUse> = (0..VMS_PER_HOST)
        .map(|vm| {
            let number = at * VMS_PER_HOST + vm;
            let configured = Bytes((2 + spread(number, 12)) * 1024 * MIB);
            let observed = Bytes(configured.value() / 2);
            let figures = VmUse { role: Role::Running, configured, observed, cpu: MilliCpu(2_000) };
            (VmId::from_u128(u128::from(number) + (1 << 64)), figures)
        })
        .collect();
    let cordon = Cordon { owner: "operator".into(), reason: "new disks".into() };
    let cordons = if at % 10 == 9 { BTreeSet::from([cordon]) } else { BTreeSet::new() };
    let used: u64 = vms.values().map(|vm| vm.observed.value()).sum();
    let kind = usize::try_from(at).unwrap_or(0) % kinds.len();
    Host {
        id,
        policy: HostPolicy {
            cluster: if at % 7 == 6 { "other".into() } else { "default".into() },
            labels: BTreeMap::from([("rack".into(), (at % 40).to_string())]),
            cordons,
            lifecycle: Lifecycle::Active,
        },
        availability: Availability::Connected,
        report: Some(Arc::new(Report {
            at: NOW,
            unreadable: None,
            total_memory: Bytes(total),
            available_memory: Bytes(total - used),
            total_cpu: MilliCpu(96_000),
            vms: Some(vms),
            capabilities: Arc::clone(&kinds[kind]),
        })),
        reservations: BTreeMap::new(),
        inbound: 0,
        outbound: 0,
    }
}

/// Puts the workloads on the host that is to be emptied.
fn fill(fleet: &mut Fleet, source: &HostId, workloads: &[Workload]) {
    let host = fleet.hosts.get_mut(source);
    if let Some(report) = host.and_then(|host| host.report.as_mut()).map(Arc::make_mut) {
        let uses = workloads.iter().map(|workload| {
            let Demand { memory, cpu } = workload.demand;
            let role = Role::Running;
            (workload.vm, VmUse { role, configured: memory, observed: memory, cpu })
        });
        report.vms = Some(uses.collect());
    }
}

/// VMs of the first host, one in five with needs of its own.
fn workloads(source: &HostId) -> Vec<Workload> {
    (0..VMS_TO_MOVE)
        .map(|vm| {
            let memory = Bytes((2 + spread(vm, 30)) * 1024 * MIB);
            let mut needs = Needs {
                architecture: Some("x86_64".into()),
                accelerator: Some("kvm".into()),
                machine_type: Some("pc-q35-10.0".into()),
                cpu_model: Some("qemu64".into()),
                bridges: BTreeSet::from(["br0".into()]),
                qemu_version: Some("10.0.2".into()),
                ..Needs::default()
            };
            if vm % 5 == 0 {
                needs.required_labels.insert("rack".into(), (vm % 40).to_string());
            }
            Workload {
                vm: VmId::from_u128(u128::from(vm)),
                host: Some(source.clone()),
                demand: Demand { memory, cpu: MilliCpu(2_000) },
                live: Live::Able,
                needs,
            }
        })
        .collect()
}
