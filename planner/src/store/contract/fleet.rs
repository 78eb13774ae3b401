//! Hosts and VMs.

use futures::future::join_all;
use vmferry_types::{Claim, Generation, PowerState, Timestamp, VmId};

use super::{NOW, NOW_US, admitted, host, id, known_vm, power, power_admitted, vm};
use crate::store::{
    AdmitPower, Adopted, Declaration, DeclarationKind, Declared, Defined, Deleted, Followed,
    HostRow, Lost, NewPower, PowerKind, Refused, SavedHost, Store, Tombstone, VmRow,
};

pub async fn a_vm_is_lost_only_under_its_owner_and_with_nothing_under_way(store: &dyn Store) {
    let row = known_vm(store, 1).await;
    let lost = Lost {
        vm: row.id,
        host: host("a"),
        generation: row.generation,
        claim: row.claim,
        cause: "signal 9".to_owned(),
    };
    let other = Lost { host: host("b"), ..lost.clone() };
    let old = Lost { claim: Claim::from_stored(0), ..lost.clone() };
    for not in [other, old] {
        assert!(!store.mark_lost(&not, NOW).await.unwrap(), "{not:?}");
    }
    let moving = known_vm(store, 2).await;
    admitted(store, 10, &moving).await;
    assert!(!store.mark_lost(&Lost { vm: moving.id, ..lost.clone() }, NOW).await.unwrap());
    assert!(store.mark_lost(&lost, NOW).await.unwrap());
    let after = store.vm(row.id).await.unwrap().unwrap();
    assert_eq!((after.power, after.error.as_str()), (PowerState::Lost, "signal 9"));
}

pub async fn a_vm_follows_only_what_is_newer(store: &dyn Store) {
    let row = known_vm(store, 1).await;
    let followed = Followed {
        vm: row.id,
        host: host("b"),
        power: PowerState::Running,
        generation: row.generation.next(),
        claim: row.claim.next(),
    };
    assert!(store.follow_vm(&followed, NOW).await.unwrap());
    assert_eq!(store.vm(row.id).await.unwrap().unwrap().host, Some(host("b")));
    let old = Followed { host: host("c"), generation: Generation::FIRST, ..followed };
    assert!(!store.follow_vm(&old, NOW).await.unwrap());
}

pub async fn names_are_unique_where_a_person_gives_them(store: &dyn Store) {
    let known = known_vm(store, 1).await;
    let same_name = vm(2, "vm1");
    assert_eq!(store.define_vm(&same_name, NOW).await.unwrap(), Defined::Taken(known.clone()));
    // What hosts already run is taken as it is, and shown.
    assert_eq!(store.adopt_vm(&same_name, NOW).await.unwrap(), Adopted::New);
    assert_eq!(store.vms_named("vm1").await.unwrap().len(), 2);
    assert_eq!(store.adopt_vm(&known, NOW).await.unwrap(), Adopted::Known(known));
    let one = HostRow {
        id: host("a"),
        name: "rack1".to_owned(),
        boot_id: "boot".to_owned(),
        agent_address: "10.0.0.1:9097".to_owned(),
        last_report: NOW,
        declared_dead: None,
    };
    assert_eq!(store.save_host(&one).await.unwrap(), SavedHost::Saved);
    let two = HostRow { id: host("b"), ..one.clone() };
    assert_eq!(store.save_host(&two).await.unwrap(), SavedHost::NameTaken { by: host("a") });
    let renamed = HostRow { name: "rack2".to_owned(), ..one };
    assert_eq!(store.save_host(&renamed).await.unwrap(), SavedHost::Saved);
    assert_eq!(store.hosts().await.unwrap(), [renamed]);
}

fn declaration(boot_id: &str) -> Declaration {
    Declaration {
        boot_id: boot_id.to_owned(),
        at: NOW,
        by: "ann".to_owned(),
        kind: DeclarationKind::FenceCommand,
        reason: "smoke".to_owned(),
        evidence: "power is off".to_owned(),
        void: None,
    }
}

async fn known_host(store: &dyn Store, name: &str, boot_id: &str) -> HostRow {
    let row = HostRow {
        id: host(name),
        name: format!("rack-{name}"),
        boot_id: boot_id.to_owned(),
        agent_address: "10.0.0.1:9097".to_owned(),
        last_report: NOW,
        declared_dead: None,
    };
    assert_eq!(store.save_host(&row).await.unwrap(), SavedHost::Saved);
    row
}

pub async fn a_planner_reads_when_another_heard_a_host(store: &dyn Store) {
    let a = known_host(store, "a", "boot").await;
    assert_eq!(store.heard_by_another(&a.id, "one").await.unwrap(), None);
    store.hear_hosts(std::slice::from_ref(&a.id), "two", NOW).await.unwrap();
    assert_eq!(store.heard_by_another(&a.id, "one").await.unwrap(), Some(NOW));
    assert_eq!(store.heard_by_another(&a.id, "two").await.unwrap(), None);
    // Whoever reports does to all of them.
    store.hear_hosts(std::slice::from_ref(&a.id), "one", Timestamp(NOW.0 + 1000)).await.unwrap();
    assert_eq!(store.heard_by_another(&a.id, "one").await.unwrap(), Some(NOW));
    // What it says of itself is another thing.
    assert_eq!(store.save_host(&a).await.unwrap(), SavedHost::Saved);
    assert_eq!(store.heard_by_another(&a.id, "two").await.unwrap(), Some(Timestamp(NOW.0 + 1000)));
    store.hear_hosts(std::slice::from_ref(&a.id), "three", NOW).await.unwrap();
    assert_eq!(store.heard_by_another(&a.id, "two").await.unwrap(), Some(Timestamp(NOW.0 + 1000)));
    assert_eq!(store.heard_by_another(&host("b"), "one").await.unwrap(), None);
}

pub async fn the_sweep_of_a_dead_host_leaves_what_a_migration_owns(store: &dyn Store) {
    known_host(store, "a", "boot").await;
    let (alone, moving, stopping) =
        (known_vm(store, 1).await, known_vm(store, 2).await, known_vm(store, 3).await);
    let elsewhere = VmRow { host: Some(host("b")), ..vm(4, "vm4") };
    store.adopt_vm(&elsewhere, NOW).await.unwrap();
    let row = admitted(store, 10, &moving).await;
    power_admitted(store, &power(20, &stopping, PowerKind::Stop)).await;
    let declared = store.declare_dead(&host("a"), &declaration("boot")).await.unwrap();
    assert_eq!(declared, Declared::Written { lost: vec![alone.id] });
    let power = async |vm: VmId| store.vm(vm).await.unwrap().unwrap().power;
    assert_eq!(power(alone.id).await, PowerState::Lost);
    assert_eq!(power(moving.id).await, PowerState::Running);
    assert_eq!(power(stopping.id).await, PowerState::Stopping);
    assert_eq!(power(elsewhere.id).await, PowerState::Running);
    assert_eq!(store.migration(id(10)).await.unwrap().unwrap(), row);
    let again = store.declare_dead(&host("a"), &declaration("boot")).await.unwrap();
    assert_eq!(again, Declared::Written { lost: Vec::new() });
}

pub async fn a_declaration_is_of_one_boot_and_void_once_that_boot_is_heard(store: &dyn Store) {
    let dead = async || store.hosts().await.unwrap().remove(0).declared_dead;
    let unknown = store.declare_dead(&host("a"), &declaration("boot")).await.unwrap();
    assert_eq!(unknown, Declared::UnknownHost);
    let row = known_host(store, "a", "boot").await;
    let other = store.declare_dead(&host("a"), &declaration("before")).await.unwrap();
    assert_eq!(other, Declared::Rebooted { boot_id: "boot".to_owned() });
    assert_eq!(dead().await, None);
    store.declare_dead(&host("a"), &declaration("boot")).await.unwrap();
    assert_eq!(dead().await, Some(declaration("boot")));
    assert!(dead().await.unwrap().proves_gone("boot"));
    // An introduction from a new boot leaves it as history.
    store.save_host(&HostRow { boot_id: "next".to_owned(), ..row }).await.unwrap();
    assert_eq!(dead().await, Some(declaration("boot")));
    assert!(!store.void_declaration(&host("a"), "next", NOW).await.unwrap());
    assert!(store.void_declaration(&host("a"), "boot", NOW).await.unwrap());
    assert!(!store.void_declaration(&host("a"), "boot", NOW).await.unwrap());
    let void = dead().await.unwrap();
    assert_eq!(void.void, Some(NOW));
    assert!(!void.proves_gone("boot"));
    store.declare_dead(&host("a"), &declaration("next")).await.unwrap();
    assert!(dead().await.unwrap().proves_gone("next"));
}

fn stopped_vm() -> VmRow {
    VmRow {
        power: PowerState::Stopped,
        generation: Generation::from_stored(7),
        claim: Claim::from_stored(9),
        ..vm(2, "vm2")
    }
}

pub async fn a_deleted_vm_leaves_its_counters(store: &dyn Store) {
    let running = known_vm(store, 1).await;
    let refused = store.delete_vm(running.id, NOW).await.unwrap();
    let power_state = PowerState::Running;
    assert_eq!(refused, Deleted::Refused(Refused::Power { power: power_state }));
    let row = stopped_vm();
    store.adopt_vm(&row, NOW).await.unwrap();
    assert_eq!(store.tombstone(row.id).await.unwrap(), None);
    assert_eq!(store.delete_vm(row.id, NOW).await.unwrap(), Deleted::Done);
    assert_eq!(store.delete_vm(row.id, NOW).await.unwrap(), Deleted::Unknown);
    assert_eq!(store.vm(row.id).await.unwrap(), None);
    assert!(store.vms_named("vm2").await.unwrap().is_empty());
    assert_eq!(store.vms().await.unwrap().len(), 1);
    let stays = Tombstone {
        vm: row.id,
        name: row.name.clone(),
        host: row.host.clone(),
        generation: row.generation,
        claim: row.claim,
        deleted: NOW,
    };
    assert_eq!(store.tombstone(row.id).await.unwrap(), Some(stays.clone()));
    // What a host reports of it does not bring it back.
    assert_eq!(store.adopt_vm(&row, NOW).await.unwrap(), Adopted::Deleted(stays));
    let followed = Followed {
        vm: row.id,
        host: host("b"),
        power: PowerState::Running,
        generation: row.generation.next(),
        claim: row.claim.next(),
    };
    assert!(!store.follow_vm(&followed, NOW).await.unwrap());
    let start = store.admit_power(&power(20, &row, PowerKind::Start), NOW_US).await.unwrap();
    assert_eq!(start, AdmitPower::Refused(Refused::UnknownVm));
}

pub async fn a_vm_under_way_is_not_deleted(store: &dyn Store) {
    let row = stopped_vm();
    store.adopt_vm(&row, NOW).await.unwrap();
    let start = power_admitted(store, &power(20, &row, PowerKind::Start)).await;
    let refused = store.delete_vm(row.id, NOW).await.unwrap();
    assert_eq!(refused, Deleted::Refused(Refused::InFlight { admission: start.id }));
}

pub async fn a_vm_that_runs_by_its_row_and_that_no_host_owns_can_be_deleted(store: &dyn Store) {
    let row = VmRow { host: None, ..vm(1, "vm1") };
    assert_eq!(row.power, PowerState::Running);
    store.adopt_vm(&row, NOW).await.unwrap();
    assert_eq!(store.delete_vm(row.id, NOW).await.unwrap(), Deleted::Done);
    assert_eq!(store.vm(row.id).await.unwrap(), None);
}

pub async fn a_vm_defined_again_goes_on_counting(store: &dyn Store) {
    let row = stopped_vm();
    store.adopt_vm(&row, NOW).await.unwrap();
    store.delete_vm(row.id, NOW).await.unwrap();
    store.raise_claim(row.id, Claim::from_stored(12), NOW).await.unwrap();
    let anew = VmRow {
        host: None,
        generation: Generation::from_stored(0),
        claim: Claim::from_stored(0),
        ..row.clone()
    };
    let defined = store.define_vm(&anew, NOW).await.unwrap();
    let expected = VmRow { claim: Claim::from_stored(12), ..row };
    assert_eq!(defined, Defined::New(expected.clone()));
    assert_eq!(store.vm(expected.id).await.unwrap(), Some(expected.clone()));
    assert_eq!(store.tombstone(expected.id).await.unwrap(), None);
    let elsewhere = NewPower { host: host("b"), ..power(20, &expected, PowerKind::Start) };
    let start = power_admitted(store, &elsewhere).await;
    assert_eq!(start.generation, Generation::from_stored(8));
    assert_eq!(start.claim, Claim::from_stored(13));
}

pub async fn of_many_definitions_at_once_one_is_written(store: &dyn Store) {
    let rows: Vec<VmRow> = (1..9).map(|of| vm(of, "web1")).collect();
    let all = join_all(rows.iter().map(|row| store.define_vm(row, NOW))).await;
    let new = all.iter().filter(|of| matches!(of, Ok(Defined::New(_)))).count();
    let taken = all.iter().filter(|of| matches!(of, Ok(Defined::Taken(_)))).count();
    assert_eq!((new, taken), (1, 7), "{all:?}");
    let rows: Vec<VmRow> = (1..9).map(|of| vm(50, &format!("name{of}"))).collect();
    let all = join_all(rows.iter().map(|row| store.define_vm(row, NOW))).await;
    let new = all.iter().filter(|of| matches!(of, Ok(Defined::New(_)))).count();
    assert_eq!(new, 1, "{all:?}");
}

pub async fn of_many_adoptions_at_once_one_is_written(store: &dyn Store) {
    let row = vm(1, "vm1");
    let all = join_all((0..6).map(|_| store.adopt_vm(&row, NOW))).await;
    let new = all.iter().filter(|of| matches!(of, Ok(Adopted::New))).count();
    let known = all.iter().filter(|of| matches!(of, Ok(Adopted::Known(_)))).count();
    assert_eq!((new, known), (1, 5), "{all:?}");
}
