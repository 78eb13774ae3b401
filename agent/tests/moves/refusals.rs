//! What cannot be started or moved is refused early, with every reason by its name.

use std::path::Path;

use tonic::Status;
use vmferry_agent_core::definition::Definition;
use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;

use crate::world::{Side, World, code};

/// A NIC whose bridge no host has.
const STRANDED_NIC: &str = "[[nic]]\nmac = '52:54:00:00:00:77'\nbridge = 'vf-no-bridge'\n";

fn codes(blockers: &[v1::Blocker]) -> Vec<&str> {
    for blocker in blockers {
        assert!(!blocker.message.is_empty(), "{} has no message", blocker.code);
    }
    blockers.iter().map(|blocker| blocker.code.as_str()).collect()
}

/// Returns the reasons of a command that was refused.
fn reasons(refused: &Status) -> Vec<v1::Blocker> {
    assert_eq!(code(refused).1, "blocked", "{refused}");
    let detail: v1::ErrorDetail = prost::Message::decode(refused.details()).unwrap();
    detail.blockers
}

/// Asks the destination, and then lets it arm: both must give the same reasons, and nothing may be
/// left of what was refused.
async fn refused_by_b(world: &mut World, source: v1::SourceDescription) -> Vec<v1::Blocker> {
    let request = v1::CheckDestinationRequest { source: Some(source.clone()) };
    let checked = world.b.client.check_destination(request).await.unwrap().into_inner().blockers;
    world.claim(Side::B).await.unwrap();
    let arm = Action::ArmReceiver(v1::ArmReceiver { source: Some(source), policy: None });
    let refused = world.execute(Side::B, arm).await.unwrap_err();
    assert_eq!(reasons(&refused), checked);
    assert_eq!(world.observe(Side::B).await.role, "absent");
    assert_eq!(world.b.launches(), 0);
    checked
}

async fn refused_start(world: &mut World, resolved_machine: &str) -> Vec<v1::Blocker> {
    world.claim(Side::A).await.unwrap();
    let start = Action::StartVm(v1::StartVm {
        definition: world.definition.clone(),
        resolved_machine: resolved_machine.to_owned(),
    });
    let refused = world.execute(Side::A, start).await.unwrap_err();
    assert_eq!(world.observe(Side::A).await.role, "absent");
    assert_eq!(world.a.launches(), 0);
    reasons(&refused)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_that_can_move_has_no_reason_against_it() {
    let mut world = World::new().await.with_disk();
    world.start().await;
    let source = world.describe().await;
    assert_eq!(codes(&source.blockers), Vec::<&str>::new());
    let request = v1::CheckDestinationRequest { source: Some(source) };
    let checked = world.b.client.check_destination(request).await.unwrap().into_inner();
    assert_eq!(checked.blockers, []);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_is_refused_with_every_reason_and_leaves_nothing_behind() {
    let mut world = World::new().await;
    world.definition += "[kernel]\nimage = '/nowhere/vmlinuz'\ninitrd = '/nowhere/initrd'\n\
                         [[disk]]\nid = 'root'\npath = '/nowhere/disk.raw'\nshared = true\n";
    world.definition += STRANDED_NIC;
    let found = refused_start(&mut world, "pc-i440fx-99.0").await;
    assert_eq!(
        codes(&found),
        ["machine_type_missing", "missing_path", "missing_path", "disk_missing", "missing_bridge"]
    );
    for (blocker, named) in found.iter().zip([
        "pc-i440fx-99.0",
        "/nowhere/vmlinuz",
        "/nowhere/initrd",
        "/nowhere/disk.raw",
        "vf-no-bridge",
    ]) {
        assert!(blocker.message.contains(named), "{} does not name {named}", blocker.message);
        assert_eq!(blocker.host_id, "a");
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_qemu_cannot_move_is_told_before_anything_is_tried() {
    let mut world = World::new().await;
    world.definition += "extra_args = ['-device', 'nvme,serial=stuck']\n";
    world.start().await;
    let source = world.describe().await;
    assert_eq!(codes(&source.blockers), ["qemu_blocked"]);
    assert!(source.blockers[0].message.contains("nvme"), "{}", source.blockers[0].message);
    let found = refused_by_b(&mut world, source).await;
    assert_eq!(codes(&found), ["qemu_blocked"]);
    assert_eq!(world.observe(Side::A).await.run_state, "running");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_destination_refuses_with_the_reasons_of_both_ends_at_once() {
    let mut world = World::new().await.with_disk();
    world.definition = world.definition.replace("shared = true", "shared = false");
    // TOML: what belongs to the VM comes before its disks.
    world.definition =
        format!("extra_args = ['-device', 'nvme,serial=stuck']\n{}", world.definition);
    world.start().await;
    let mut source = world.describe().await;
    assert_eq!(codes(&source.blockers), ["qemu_blocked", "disk_not_shared"]);
    // Both hosts see the same files: these are gone for the source too, whose guest has them open.
    let vm = Definition::parse(&source.definition).unwrap();
    for path in vm.firmware.iter().chain(vm.disks.iter().map(|disk| &disk.path)) {
        std::fs::remove_file(Path::new(path)).unwrap();
    }
    source.resolved_machine = "pc-i440fx-99.0".to_owned();
    source.qemu_version = "99.0.0".to_owned();
    source.definition += STRANDED_NIC;
    let found = refused_by_b(&mut world, source).await;
    assert_eq!(
        codes(&found),
        [
            "qemu_blocked",
            "disk_not_shared",
            "machine_type_missing",
            "missing_path",
            "disk_missing",
            "missing_bridge",
            "qemu_older"
        ]
    );
    assert!(found[2..].iter().all(|blocker| blocker.host_id == "b"), "{found:?}");
    assert_eq!(world.observe(Side::A).await.run_state, "running");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_that_somebody_else_has_is_passed_over() {
    let mut world = World::new().await;
    world.start().await;
    world.admit(&[Side::A, Side::B]).await;
    let first = u16::try_from(world.arm().await.port).unwrap();
    let destroy = v1::DestroyReceiver { cause: "a trial".to_owned(), source_gone: None };
    world.execute(Side::B, Action::DestroyReceiver(destroy)).await.unwrap();
    let _taken = std::net::TcpListener::bind(("127.0.0.1", first + 1)).unwrap();
    world.admit(&[Side::A, Side::B]).await;
    assert_eq!(world.arm().await.port, u32::from(first) + 2);
    world.end().await;
}
