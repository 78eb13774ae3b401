use std::fs;
use std::path::PathBuf;

use expect_test::expect;
use serde_json::{Value, json};

use super::*;

fn cases() -> Vec<(String, Value)> {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../planner/core/tests/cases"));
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let json = files.into_iter().filter(|path| path.extension().is_some_and(|e| e == "json"));
    json.map(|path| {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        (name, serde_json::from_slice(&fs::read(&path).unwrap()).unwrap())
    })
    .filter(|(_, case): &(String, Value)| case.get("input").is_some())
    .collect()
}

fn case(start: &str) -> Value {
    let found = cases().into_iter().find(|(name, _)| name.starts_with(start));
    found.unwrap().1["input"].clone()
}

fn answered(input: &Value) -> Value {
    let text = serde_json::to_vec(input).unwrap();
    serde_json::to_value(answer(&text).unwrap_or_else(|error| panic!("{error}"))).unwrap()
}

fn refused(input: &Value) -> String {
    answer(&serde_json::to_vec(input).unwrap()).unwrap_err().to_string()
}

/// Keeps only the named fields of each element.
fn only(list: &Value, fields: &[&str]) -> Value {
    let kept = list.as_array().unwrap().iter().map(|one| {
        Value::Object(
            fields.iter().map(|field| ((*field).to_owned(), one[field].clone())).collect(),
        )
    });
    kept.collect()
}

/// Brings every list of a value, and every list in it, into an order of chance.
fn shuffle(value: &mut Value, chance: &mut impl FnMut() -> u64) {
    if let Some(list) = value.as_array_mut() {
        for left in (1..list.len()).rev() {
            let with = chance() % (left as u64 + 1);
            list.swap(left, usize::try_from(with).unwrap());
        }
        list.iter_mut().for_each(|item| shuffle(item, chance));
    } else if let Some(object) = value.as_object_mut() {
        object.values_mut().for_each(|item| shuffle(item, chance));
    }
}

/// The numbers of a seed: a linear congruential generator with Knuth's constants for MMIX.
fn chance(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    }
}

#[test]
fn every_case_is_answered_as_expected_whatever_the_order_of_its_input() {
    let cases = cases();
    assert_eq!(cases.len(), 15);
    for (name, case) in cases {
        let (input, expected) = (&case["input"], &case["expected"]);
        let answer = answered(input);
        assert_eq!(answer["plan_state"], expected["plan_state"], "{name}");
        let assignments = only(&answer["assignments"], &["vm", "target", "mode"]);
        assert_eq!(assignments, expected["assignments_in_order"], "{name}");
        let blockers = only(&answer["blockers"], &["vm", "code"]);
        assert_eq!(blockers, only(&expected["blockers"], &["vm", "code"]), "{name}");
        for host in answer["hosts"].as_array().unwrap() {
            let by_hand = &case["derived"][host["host"].as_str().unwrap()]["free_mib_after"];
            let left = &host["memory_mib"]["left"];
            assert!(by_hand.is_null() || left.is_null() || by_hand == left, "{name}: {host}");
        }
        for seed in 0..50 {
            let mut shuffled = input.clone();
            shuffle(&mut shuffled, &mut chance(seed));
            assert_eq!(answered(&shuffled), answer, "{name}, seed {seed}: {shuffled}");
        }
    }
}

#[test]
fn a_host_whose_figures_cannot_be_is_warned_of() {
    let answer = answered(&case("C13"));
    assert_eq!(answer["warnings"], json!(["host h2: unreadable: total memory 0"]));
}

#[test]
fn ties_are_decided_by_the_bytes_of_ids_and_ids_may_be_any_text() {
    let mut input = case("C14");
    let hosts = input["hosts"].as_array_mut().unwrap();
    let source = hosts[0].clone();
    let twin = |id: &str| {
        let mut host = source.clone();
        host["id"] = id.into();
        host["vms"] = json!([]);
        host["cordoned"] = false.into();
        host["available_memory_mib"] = host["total_memory_mib"].clone();
        host
    };
    *hosts = vec![source.clone(), twin("a"), twin("B"), twin("host 10"), twin("host 2")];
    assert_eq!(answered(&input)["assignments"][0]["target"], "B");
    input["hosts"]
        .as_array_mut()
        .unwrap()
        .retain(|host| host["id"].as_str().unwrap().starts_with('h'));
    assert_eq!(answered(&input)["assignments"][0]["target"], "host 10");
}

#[test]
fn a_pin_to_a_host_that_is_not_there_is_named() {
    let mut input = case("C14");
    input["workloads"][0]["pinned_host"] = "h99".into();
    let answer = answered(&input);
    let blocker = &answer["blockers"][0];
    assert_eq!(blocker["code"], "pinned_target_unavailable");
    let expected = "host h99, which the VM is pinned to, is not in the file";
    assert_eq!(blocker["message"], expected);
    let reasons = &blocker["ruled_out"][0]["reasons"];
    let told = reasons
        .as_array()
        .unwrap()
        .iter()
        .any(|why| why["message"] == "the VM is pinned to host h99");
    assert!(told, "{reasons}");
}

#[test]
fn a_field_that_is_wrong_is_named_with_its_place() {
    let with = |pointer: &str, value: Value| {
        let mut input = case("C27");
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        input.pointer_mut(parent).unwrap()[field] = value;
        refused(&input)
    };
    for (pointer, value, expected) in [
        ("/hosts/1/colour", json!("red"), "unknown field `colour`"),
        ("/hosts/1/total_memory_mib", json!("64"), "hosts[1].total_memory_mib: invalid type"),
        ("/hosts/1/total_memory_mib", json!(-1), "hosts[1].total_memory_mib: invalid value"),
        ("/hosts/0/vms/1/cpu_milli", json!(1.5), "hosts[0].vms[1].cpu_milli: invalid type"),
        ("/hosts/1/total_memory_mib", json!(u64::MAX), "hosts[1].total_memory_mib: "),
        ("/hosts/1/id", json!(""), "hosts[1].id: is empty"),
        ("/hosts/1/id", json!("h3"), "hosts[2].id: h3 is there twice"),
        ("/hosts/1/status", json!("up"), "hosts[1].status: unknown variant `up`, expected"),
        ("/policy/strategy", json!("live-first"), "policy.strategy: unknown variant `live-first`"),
        ("/policy/max_parallel", json!(0), "policy.max_parallel: invalid value"),
        ("/policy/reserve_memory_percent", json!(101), "101 is not a percentage: 0 to 100"),
        ("/policy/dry_run", json!("yes"), "policy.dry_run: invalid type"),
        ("/policy/allow_pinned", json!(1), "policy.allow_pinned: invalid type"),
        ("/workloads/1/id", json!("vm-a"), "workloads[1].id: vm-a is there twice"),
        ("/workloads/0/pinned_host", json!(7), "workloads[0].pinned_host: invalid type"),
    ] {
        let told = with(pointer, value);
        assert!(told.contains(expected), "{pointer}: {told}");
    }
}

#[test]
fn every_field_is_required_but_names() {
    let input = case("C27");
    let mut wanting = 0;
    for (parent, object) in [
        ("", input.clone()),
        ("/policy", input["policy"].clone()),
        ("/hosts/0", input["hosts"][0].clone()),
        ("/hosts/0/vms/0", input["hosts"][0]["vms"][0].clone()),
        ("/workloads/0", input["workloads"][0].clone()),
    ] {
        for field in object.as_object().unwrap().keys() {
            let mut less = input.clone();
            less.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(field);
            let told = refused(&less);
            assert!(told.contains(&format!("missing field `{field}`")), "{parent}/{field}: {told}");
            wanting += 1;
        }
    }
    assert_eq!(wanting, 37);
}

#[test]
fn what_is_no_json_or_more_than_one_value_is_refused() {
    for text in ["", "[]", "{", "null"] {
        assert!(answer(text.as_bytes()).is_err(), "{text}");
    }
    let twice = format!("{} {{}}", case("C27"));
    let told = answer(twice.as_bytes()).unwrap_err().to_string();
    assert!(told.contains("trailing characters"), "{told}");
}

#[test]
fn the_example_is_a_plan_that_can_be_carried_out() {
    let answer = answer(include_bytes!("../../plan.example.json")).unwrap();
    assert!(answer.is_planned());
    assert_eq!(answer.assignments[0].name.as_deref(), Some("the web server"));
    assert_eq!(answer.assignments[0].candidates, 1);
}

#[test]
fn a_plan_is_explained_with_its_figures() {
    let text = serde_json::to_vec(&case("C12")).unwrap();
    expect![[r#"
        BLOCKED: host h1 cannot be emptied: 3 of its 5 VMs have no place

        VM     MEMORY  CPU     FROM  TO  MODE  LEFT THERE         WHY
        vm-p3  16 GiB  1 vCPU  h1    h2  live  12.7 GiB, 63 vCPU  the only host that can take it
        vm-f   12 GiB  1 vCPU  h1    h5  live  45.5 GiB, 63 vCPU  most memory left of the 2 hosts that can take it
        vm-p1  8 GiB   1 vCPU  h1    -   -     -                  pinned_target_unavailable: host h3, which the VM is pinned to, takes no placements or lacks what the VM needs
        vm-p2  4 GiB   1 vCPU  h1    -   -     -                  insufficient_capacity: no host that can take the VM has room
        vm-g   2 GiB   1 vCPU  h1    -   -     -                  pinned_target_unavailable: host h9, which the VM is pinned to, is not in the file

        vm-p1 (8 GiB, 1 vCPU) went nowhere, pinned_target_unavailable:
          h2: the VM is pinned to host h3
          h3: it is in maintenance
          h4: the VM is pinned to host h3; 8 GiB of memory needed, 1.3 GiB free
          h5: the VM is pinned to host h3

        vm-p2 (4 GiB, 1 vCPU) went nowhere, insufficient_capacity:
          h2: the VM is pinned to host h4
          h3: the VM is pinned to host h4; it is in maintenance
          h4: 4 GiB of memory needed, 1.3 GiB free
          h5: the VM is pinned to host h4

        vm-g (2 GiB, 1 vCPU) went nowhere, pinned_target_unavailable:
          h2: the VM is pinned to host h9
          h3: the VM is pinned to host h9; it is in maintenance
          h4: the VM is pinned to host h9; 2 GiB of memory needed, 1.3 GiB free
          h5: the VM is pinned to host h9

        Hosts, before and after:
          HOST  TOTAL   RESERVE  OBSERVED  COMMITTED  FREE      LEFT      CPU FREE  CPU LEFT  TAKES NOTHING BECAUSE
          h1    64 GiB  6.4 GiB  44.4 GiB  42 GiB     13.1 GiB  13.1 GiB  59 vCPU   59 vCPU   it is the one to be emptied
          h2    32 GiB  3.2 GiB  0 B       0 B        28.7 GiB  12.7 GiB  64 vCPU   63 vCPU   -
          h3    64 GiB  6.4 GiB  0 B       0 B        57.5 GiB  57.5 GiB  64 vCPU   64 vCPU   it is in maintenance
          h4    16 GiB  1.6 GiB  13 GiB    0 B        1.3 GiB   1.3 GiB   64 vCPU   64 vCPU   -
          h5    64 GiB  6.4 GiB  0 B       0 B        57.5 GiB  45.5 GiB  64 vCPU   63 vCPU   -
    "#]].assert_eq(&super::text(&answer(&text).unwrap()));
}
