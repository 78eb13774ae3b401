//! Certificates, for people.

use super::table::{fields, table};
use crate::pki::{Made, Shown};

/// Says what was made.
pub(crate) fn made(made: &Made) -> String {
    let who = if made.identity.is_empty() { "authority" } else { &made.identity };
    let mut text = fields(&[
        ("made", who.to_owned()),
        ("in", made.dir.display().to_string()),
        ("counts until", made.not_after.clone()),
        ("replaced", made.replaced.join(", ")),
    ]);
    for note in &made.notes {
        text += &format!("note: {note}\n");
    }
    text
}

/// Shows certificates, one after another.
pub(crate) fn shown(shown: &Shown) -> String {
    let rows = shown.certificates.iter().map(|row| {
        let who = if row.identity.is_empty() { &row.subject } else { &row.identity };
        vec![
            row.file.clone(),
            row.role.clone(),
            who.clone(),
            row.not_after.clone(),
            row.days_left.to_string(),
            row.state.replace('_', " "),
        ]
    });
    let header = ["FILE", "ROLE", "WHO", "NOT AFTER", "DAYS LEFT", "STATE"];
    let mut text = table(&header, rows.collect(), "no certificate");
    for row in &shown.certificates {
        text += &format!("\n{}\n", row.file);
        text += &fields(&[
            ("  subject", row.subject.clone()),
            ("  issuer", row.issuer.clone()),
            ("  names", row.names.join(", ")),
            ("  serial", row.serial.clone()),
            ("  sha-256", row.fingerprint.clone()),
            ("  not before", row.not_before.clone()),
        ]);
    }
    if !shown.problem.is_empty() {
        text += &format!("\ncannot be used: {}\n", shown.problem);
    }
    text
}
