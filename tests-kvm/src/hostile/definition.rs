//! VM definitions that no agent starts.

use super::dice::Dice;

/// Returns a definition that has to be refused, by the planner or by the agent.
pub fn unusable(dice: &mut Dice) -> String {
    match dice.below(14) {
        // Brackets, keys and tables as deep as they can be nested.
        0 => format!("x = {}", "[".repeat(100_000)),
        1 => format!("x = {}", "{a=".repeat(50_000)),
        2 => format!("{}a = 1", "a.".repeat(50_000)),
        3 => format!("[{}a]", "a.".repeat(50_000)),
        4 => "[[disk]]\n[disk.a]\n".repeat(1000),
        5 => "\0".repeat(100),
        6 => whole(dice, "name = \"x\"\nname = \"y\""),
        _ => {
            let lines = wrong_values(dice);
            whole(dice, &lines)
        }
    }
}

/// Returns lines of a definition whose values nobody can have.
fn wrong_values(dice: &mut Dice) -> String {
    dice.pick(&[
        "name = \"../../x\"",
        "name = \"a\\u0000b\"",
        "name = \"\"",
        "name = 7",
        "name = \"ok\"\nmemory = \"99999999999999999999TiB\"",
        "name = \"ok\"\nmemory = \"-1MiB\"",
        "name = \"ok\"\nmemory = \"0\"",
        "name = \"ok\"\nmemory = \"64MiB\"\nvcpus = -1",
        "name = \"ok\"\nmemory = \"64MiB\"\nvcpus = 9223372036854775807",
        "name = \"ok\"\nmemory = \"64MiB\"\npin = \"../x\"",
        "name = \"ok\"\nmemory = \"64MiB\"\npin = \"nowhere\"",
        "name = \"ok\"\nmemory = \"64MiB\"\nrequired_labels = { a = 1 }",
        "name = \"ok\"\nmemory = 64",
    ])
    .to_owned()
}

fn whole(dice: &mut Dice, lines: &str) -> String {
    format!("uuid = \"{}\"\n{lines}\nmachine = \"q35\"\naccel = \"tcg\"\n", dice.uuid())
}

/// Returns a definition whose outline is right and which has so many disks that no machine has
/// place for them.
#[must_use]
pub fn of_many_disks(uuid: &str, count: usize) -> String {
    let disks: String =
        (0..count).map(|at| format!("[[disk]]\npath = \"/x/{at}.raw\"\n")).collect();
    format!(
        "uuid = \"{uuid}\"\nname = \"many-disks\"\nmachine = \"q35\"\naccel = \"tcg\"\nmemory = \"16MiB\"\n{disks}"
    )
}

/// Returns a definition for an agent that is wrong in a place that only agents read.
pub fn unusable_at_agent(uuid: &str, dice: &mut Dice) -> String {
    let wrong = dice.pick(&[
        "firmware = \"rom.bin\"",
        "firmware = \"/a\\u0000b\"",
        "extra_args = [\"-S\"]",
        "extra_args = [\"--incoming\", \"tcp:0.0.0.0:1\"]",
        "extra_args = [\"a\\u0000b\"]",
        "[[disk]]\npath = \"../x.raw\"",
        "[[disk]]\npath = \"/x.raw\"\nformat = \"vmdk\"",
        "[[disk]]\npath = \"/x.raw\"\nid = \"a,b=c\"",
        "[[nic]]\nmac = \"ff:ff:ff:ff:ff:ff\"\nbridge = \"br0\"",
        "[[nic]]\nmac = \"52:54:00:00:00:01\"\nbridge = \"br0,script=/bin/sh\"",
        "[kernel]\nimage = \"relative\"",
        "vcpus = 4096",
    ]);
    format!(
        "uuid = \"{uuid}\"\nname = \"wrong\"\nmachine = \"q35\"\naccel = \"tcg\"\nmemory = \"16MiB\"\n{wrong}\n"
    )
}
