//! The contract on both engines, and what concerns only one of them.

mod postgres;
mod sqlite;
mod upgrade;

use vmferry_types::PhaseLabel;

use super::open::SCHEMA;

#[test]
fn the_schema_names_the_phases_of_the_machine() {
    let schema = SCHEMA.iter().map(|(_, _, sql)| *sql).collect::<String>();
    let phases: Vec<String> =
        PhaseLabel::ALL.iter().map(|phase| format!("'{}'", phase.label())).collect();
    let flat = schema.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(flat.contains(&format!("CHECK (phase IN ({}))", phases.join(", "))));
}
