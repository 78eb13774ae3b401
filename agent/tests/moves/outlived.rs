//! What outlives an agent that was away when it happened.

use std::io::Write as _;

use vmferry_proto::v1;
use vmferry_proto::v1::execute_request::Action;

use crate::world::{Side, World, code, freeze, kill};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_was_handed_over_is_held_also_by_the_next_agent() {
    let mut world = World::new().await;
    world.up_to_the_switchover().await;
    assert_eq!(world.observe(Side::A).await.role, "running");
    world.order().await.unwrap();
    world.wait_complete().await;
    let before = world.observe(Side::A).await;
    assert_eq!((before.role.as_str(), before.run_state.as_str()), ("held", "postmigrate"));
    world.a.restart().await;
    let held = |seen: &v1::VmObservation| seen.knowledge() == v1::Knowledge::Known;
    let after = world.wait(Side::A, "the guest", held).await;
    assert_eq!((after.role.as_str(), after.handed), ("held", true));
    assert!(after.stopped_at_us > 0 && after.resumed_at_us == 0);
    let told = world.a.report().await;
    assert_eq!((told.vms[0].role.as_str(), told.vms[0].handed), ("held", true));
    // Nothing lets it go on but proof that the receiver is gone.
    let resume = Action::ResumeSource(v1::ResumeSource { receiver_gone: None });
    assert_eq!(code(&world.execute(Side::A, resume).await.unwrap_err()).1, "invalid");
    let cancel = v1::CancelTransfer { cause: "asked".to_owned() };
    let refused = world.execute(Side::A, Action::CancelTransfer(cancel)).await.unwrap_err();
    assert_eq!(code(&refused).1, "wrong_state");
    assert_eq!(world.observe(Side::A).await.run_state, "postmigrate");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_ran_again_after_the_order_is_known_though_nobody_watched() {
    let mut world = World::new().await.with_disk();
    world.up_to_the_switchover().await;
    let (source, receiver) = (
        world.observe(Side::A).await.qemu.unwrap().pid,
        world.observe(Side::B).await.qemu.unwrap().pid,
    );
    freeze(receiver);
    world.order().await.unwrap();
    let stood = world.observe(Side::A).await;
    assert!(stood.stopped_at_us > 0 && stood.resumed_at_us == 0 && stood.role == "held");
    world.a.stop().await;
    // The channel breaks, and QEMU lets the guest go on by itself.
    kill(receiver);
    wait_until_resumed(&world).await;
    world.a.start().await;
    let seen = world.wait(Side::A, "the guest", |seen| seen.run_state == "running").await;
    assert!(seen.resumed_at_us >= seen.stopped_at_us && seen.stopped_at_us > 0, "{seen:#?}");
    assert_eq!((seen.handed, seen.role.as_str()), (true, "running"));
    let forward = Action::KillSource(v1::KillSource { cause: "forward".to_owned() });
    assert_eq!(code(&world.execute(Side::A, forward).await.unwrap_err()).1, "wrong_state");
    // It is known even of a QEMU that has ended since.
    world.a.stop().await;
    kill(source);
    world.a.start().await;
    let seen = world.wait(Side::A, "the end", |seen| seen.gone.is_some()).await;
    assert!(seen.resumed_at_us >= seen.stopped_at_us && seen.stopped_at_us > 0, "{seen:#?}");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_ran_again_is_seen_to_though_nobody_has_written_so() {
    let mut world = World::new().await.with_disk();
    world.up_to_the_switchover().await;
    let receiver = world.observe(Side::B).await.qemu.unwrap().pid;
    freeze(receiver);
    world.order().await.unwrap();
    world.a.stop().await;
    kill(receiver);
    wait_until_resumed(&world).await;
    // As a new agent finds it that is faster than a busy shim.
    let launches = std::fs::read_dir(world.a.run_dir()).unwrap().flatten();
    for path in launches.map(|launch| launch.path().join("guest.json")) {
        let Ok(text) = std::fs::read(&path) else { continue };
        let mut record: serde_json::Value = serde_json::from_slice(&text).unwrap();
        record["resumed_at_us"] = 0.into();
        std::fs::write(&path, record.to_string()).unwrap();
    }
    world.a.start().await;
    let ran = |seen: &v1::VmObservation| {
        let again = seen.resumed_at_us >= seen.stopped_at_us && seen.stopped_at_us > 0;
        seen.run_state == "running" && again
    };
    world.wait(Side::A, "the guest to have gone on", ran).await;
    world.end().await;
}

/// Waits until the shim has written down that the guest went on.
async fn wait_until_resumed(world: &World) {
    let mut ticks = tokio::time::interval(std::time::Duration::from_millis(5));
    let resumed = async {
        loop {
            ticks.tick().await;
            let launches = std::fs::read_dir(world.a.run_dir()).unwrap().flatten();
            let guests = launches.map(|launch| launch.path().join("guest.json"));
            let texts = guests.filter_map(|path| std::fs::read(path).ok());
            let records = texts.filter_map(|text| serde_json::from_slice(&text).ok());
            let at = |record: &serde_json::Value, key: &str| record[key].as_u64().unwrap_or(0);
            let ran = |record: serde_json::Value| {
                at(&record, "resumed_at_us") > at(&record, "stopped_at_us")
            };
            if records.into_iter().any(ran) {
                return;
            }
        }
    };
    tokio::time::timeout(crate::world::BOUND, resumed).await.expect("the guest goes on");
}

/// Turns the machine off by ACPI.
const POWER_OFF: &[u8] = &[
    0xba, 0xf8, 0x0c, // mov dx, 0xcf8
    0x66, 0xb8, 0x40, 0x0b, 0x00, 0x80, // mov eax, PIIX4's PM base register
    0x66, 0xef, // out dx, eax
    0xba, 0xfc, 0x0c, // mov dx, 0xcfc
    0x66, 0xb8, 0x01, 0x06, 0x00, 0x00, // mov eax, 0x600 as IO
    0x66, 0xef, // out dx, eax
    0xba, 0xf8, 0x0c, // mov dx, 0xcf8
    0x66, 0xb8, 0x80, 0x0b, 0x00, 0x80, // mov eax, PIIX4's PM enable register
    0x66, 0xef, // out dx, eax
    0xba, 0xfc, 0x0c, // mov dx, 0xcfc
    0xb0, 0x01, // mov al, 1
    0xee, // out dx, al
    0xba, 0x04, 0x06, // mov dx, PM1a control
    0xb8, 0x00, 0x20, // mov ax, soft off
    0xef, // out dx, ax
];

/// Says to a pvpanic device what a kernel says that panics.
const PANIC: &[u8] = &[
    0xba, 0x05, 0x05, // mov dx, pvpanic
    0xb0, 0x01, // mov al, panicked
    0xee, // out dx, al
];

/// Makes a ROM that waits for a byte on its serial port, and then does something.
fn rom(then: &[u8]) -> Vec<u8> {
    // mov dx, the port's line status; wait: in al, dx; test al, 1; jz wait
    let wait = [0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xfb];
    // hlt; jmp back
    let code = [&wait[..], then, &[0xf4, 0xeb, 0xfd]].concat();
    let mut rom = vec![0_u8; 64 << 10];
    rom[0xff00..0xff00 + code.len()].copy_from_slice(&code);
    // At the reset vector: jmp 0xff00.
    rom[0xfff0..0xfff3].copy_from_slice(&[0xe9, 0x0d, 0xff]);
    rom
}

/// Starts a guest that does something by itself, and lets it; returns once its QEMU has ended.
async fn ended_by_itself(does: &[u8]) -> World {
    let mut world = World::new().await;
    let [off, idle, port] =
        ["off.bin", "idle.bin", "port"].map(|name| world.a.run_dir().with_file_name(name));
    std::fs::write(&off, rom(does)).unwrap();
    let chardev = format!("socket,id=port,path={},server=on,wait=off", port.display());
    let rest = world.definition.replace(&idle.display().to_string(), &off.display().to_string());
    world.definition = format!(
        "extra_args = ['-chardev', '{chardev}', '-device', 'isa-serial,chardev=port', \
         '-device', 'pvpanic']\n{rest}"
    );
    world.start().await;
    std::os::unix::net::UnixStream::connect(&port).unwrap().write_all(b"go").unwrap();
    world.wait(Side::A, "the end", |seen| seen.gone.is_some()).await;
    world
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_turned_itself_off_is_told_from_one_that_was_lost_for_good() {
    let mut world = ended_by_itself(POWER_OFF).await;
    for _ in 0..2 {
        let seen = world.wait(Side::A, "the end", |seen| seen.gone.is_some()).await;
        assert_eq!(seen.run_state, "shutdown");
        let told = world.a.report().await.vms.remove(0);
        assert_eq!((told.guest_end.as_str(), told.gone.is_some()), ("shutdown", true));
        world.a.restart().await;
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_whose_kernel_panicked_is_lost_and_says_so() {
    let mut world = ended_by_itself(PANIC).await;
    for _ in 0..2 {
        world.wait(Side::A, "the end", |seen| seen.gone.is_some()).await;
        let told = world.a.report().await.vms.remove(0);
        assert_eq!((told.run_state.as_str(), told.guest_end.as_str()), ("guest-panicked", ""));
        assert!(told.gone.is_some());
        world.a.restart().await;
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_was_killed_did_not_end_itself() {
    let mut world = World::new().await;
    world.start().await;
    kill(world.observe(Side::A).await.qemu.unwrap().pid);
    world.wait(Side::A, "the end", |seen| seen.gone.is_some()).await;
    let report = world.a.report().await;
    assert_eq!((report.vms[0].guest_end.as_str(), report.vms[0].gone.is_some()), ("", true));
    world.end().await;
}
