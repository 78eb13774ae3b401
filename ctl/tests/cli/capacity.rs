//! `vmferry capacity`.

use expect_test::expect;
use vmferry_proto::v1::{
    Blocker, CapacityFit, CapacityReply, CapacityRequest, CpuCapacity, FleetCapacity, HostCapacity,
    HostFit, HostLoss, HugePages, LossBlocked, LossPlacement, MemoryCapacity,
};

use crate::fake_planner::Answers;
use crate::run;

const GIB: u64 = 1 << 30;

fn memory(gib: [u64; 6]) -> Option<MemoryCapacity> {
    let [total, reserve, observed, committed, reserved, free] = gib.map(|gib| gib * GIB);
    Some(MemoryCapacity {
        total_bytes: total,
        reserve_bytes: reserve,
        observed_bytes: observed,
        committed_bytes: committed,
        reserved_bytes: reserved,
        free_bytes: free,
        available_bytes: total - observed,
    })
}

fn cpu(total: u64, free: u64) -> Option<CpuCapacity> {
    let (total_milli, free_milli) = (total * 1000, free * 1000);
    let committed_milli = total_milli - free_milli;
    Some(CpuCapacity { total_milli, usable_milli: total_milli, committed_milli, free_milli })
}

fn fleet() -> CapacityReply {
    let blocker = Blocker {
        code: "unreadable".into(),
        message:
            "host b: its agent says: VM web2: its memory: /proc/7/smaps_rollup does not say Pss"
                .into(),
        host_id: "b".into(),
    };
    CapacityReply {
        hosts: vec![
            HostCapacity {
                id: "a".into(),
                memory: memory([64, 6, 30, 40, 4, 18]),
                cpu: cpu(16, 10),
                binds: "committed_memory".into(),
                vms: 3,
                hugepages: vec![HugePages {
                    page_bytes: 2 << 20,
                    total: 1024,
                    free: 512,
                    reserved: 256,
                }],
                ..HostCapacity::default()
            },
            HostCapacity {
                id: "b".into(),
                unreadable: "its memory cannot be read".into(),
                blockers: vec![blocker],
                ..HostCapacity::default()
            },
        ],
        fleet: Some(FleetCapacity {
            open_hosts: 1,
            closed_hosts: 1,
            memory: memory([64, 6, 30, 40, 4, 18]),
            cpu: cpu(16, 10),
            binds: "committed_memory".into(),
        }),
        warnings: vec!["host b counts for nothing: its memory cannot be read".into()],
        ..CapacityReply::default()
    }
}

#[tokio::test]
async fn the_fleet_is_shown_with_its_units_and_what_takes_nothing() {
    let answers = Answers { capacity: fleet(), ..Answers::default() };
    let (ended, planner) = run(answers.clone(), &["capacity"]).await;
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    assert_eq!(planner.asked().capacity, [CapacityRequest::default()]);
    expect![[r#"
        HOST    TOTAL   RESERVE  OBSERVED  COMMITTED  RESERVED  FREE    CPU      CPU FREE  VMS  BINDS             TAKES NOTHING BECAUSE
        a       64 GiB  6 GiB    30 GiB    40 GiB     4 GiB     18 GiB  16 vCPU  10 vCPU   3    committed memory  -
        b       -       -        -         -          -         -       -        -         0    -                 its agent says: VM web2: its memory: /proc/7/smaps_rollup does not say Pss
        1 open  64 GiB  6 GiB    30 GiB    40 GiB     4 GiB     18 GiB  16 vCPU  10 vCPU   -    committed memory  1 more take nothing, and are not counted

        Huge pages:
          a: 512 MiB free of 2 GiB in pages of 2 MiB

        Look at:
          host b counts for nothing: its memory cannot be read
    "#]].assert_eq(&ended.stdout);
    for args in [["capacity", "--json"].as_slice(), &["-o", "json", "capacity"]] {
        let (ended, _) = run(answers.clone(), args).await;
        let told: CapacityReply = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(told, fleet());
    }
}

#[tokio::test]
async fn a_host_that_cannot_be_lost_ends_with_3_and_every_reason() {
    let reason = |host: &str, message: &str| Blocker {
        code: "memory".into(),
        message: format!("host {host}: {message}"),
        host_id: host.into(),
    };
    let loss = HostLoss {
        host: "a".into(),
        can_be_lost: false,
        placed: vec![LossPlacement {
            vm_name: "web1".into(),
            memory_bytes: 4 * GIB,
            cpu_milli: 2000,
            host: "b".into(),
            left_memory_bytes: 2 * GIB,
            left_cpu_milli: 6000,
            ..LossPlacement::default()
        }],
        blocked: vec![LossBlocked {
            vm_name: "db1".into(),
            memory_bytes: 32 * GIB,
            cpu_milli: 8000,
            code: "insufficient_capacity".into(),
            message: "no host that can take the VM has room".into(),
            blockers: vec![reason("b", "32 GiB of memory needed, 2 GiB free")],
            ..LossBlocked::default()
        }],
        ..HostLoss::default()
    };
    let fit = CapacityFit {
        count: 2,
        memory_bytes: GIB + (68 << 20),
        overhead_bytes: 68 << 20,
        cpu_milli: 500,
        hosts: vec![HostFit { host: "b".into(), count: 2 }, HostFit { host: "c".into(), count: 0 }],
    };
    let capacity =
        CapacityReply { without: Some(loss), fit: Some(fit), ..CapacityReply::default() };
    let answers = Answers { capacity, ..Answers::default() };
    let args = ["capacity", "--without", "a", "--fit", "1GiB,0.5"];
    let (ended, planner) = run(answers, &args).await;
    assert_eq!(ended.code, 3, "{}", ended.stderr);
    let asked = planner.asked().capacity.remove(0);
    assert_eq!(
        (asked.without.as_str(), asked.fit_memory_bytes, asked.fit_cpu_milli),
        ("a", GIB, 500)
    );
    expect![[r#"
        no hosts: none has reported to this planner

        Without host a: it cannot be lost, 1 of its 2 VMs have no place.
          VM    MEMORY  CPU     TO  LEFT THERE     WHY NOT
          web1  4 GiB   2 vCPU  b   2 GiB, 6 vCPU  -
          db1   32 GiB  8 vCPU  -   -              insufficient_capacity: no host that can take the VM has room

        db1 goes nowhere:
          host b: 32 GiB of memory needed, 2 GiB free

        2 more of 1 GiB and 0.5 vCPU fit, without host a (68 MiB of it for QEMU):
          HOST  FIT
          b     2
    "#]].assert_eq(&ended.stdout);
    assert!(ended.stderr.contains("1 of its 2 VMs have no place elsewhere"), "{}", ended.stderr);
}

#[tokio::test]
async fn a_size_without_a_unit_is_a_usage_error() {
    let (ended, planner) = run(Answers::default(), &["capacity", "--fit", "4,2"]).await;
    assert_eq!(ended.code, 2);
    assert!(ended.stderr.contains("write for example 512MiB or 4GiB"), "{}", ended.stderr);
    assert!(planner.asked().capacity.is_empty());
}
