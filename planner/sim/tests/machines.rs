//! Machines whose clocks are wrong, or that stand still for a while. Time is virtual: what sleeps here
//! waits for nothing real.

use std::sync::Arc;
use std::time::Duration;

use vmferry_planner::clock::{now_us, simulated};

#[tokio::test(start_paused = true)]
async fn a_task_reads_the_clock_of_its_machine_and_stands_still_with_it() {
    simulated::set(1_000_000);
    let machine = Arc::new(simulated::Machine::default());
    machine.set_skew(-400_000);
    let task = simulated::on(Some(Arc::clone(&machine)), async {
        let early = now_us();
        tokio::time::sleep(Duration::from_millis(10)).await;
        (early, now_us())
    });
    let other = async {
        tokio::time::sleep(Duration::from_millis(1)).await;
        machine.freeze();
        tokio::time::sleep(Duration::from_millis(500)).await;
        machine.thaw();
        now_us()
    };
    let ((early, late), right) = tokio::join!(task, other);
    assert_eq!(early, 600_000);
    assert_eq!(right, 1_501_000);
    assert_eq!(late, 1_101_000);
}
