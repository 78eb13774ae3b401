//! Tables and lists of fields, without borders: they stay readable in a pipe.

use comfy_table::{Table, presets};

/// Lays `rows` out under `header`; `otherwise` stands alone where there are none.
pub(crate) fn table(header: &[&str], rows: Vec<Vec<String>>, otherwise: &str) -> String {
    if rows.is_empty() {
        return format!("{otherwise}\n");
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header.to_vec());
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    format!("{}\n", table.trim_fmt())
}

/// Lays out `name value` lines; those without a value are left out.
pub(crate) fn fields(fields: &[(&str, String)]) -> String {
    let shown = || fields.iter().filter(|(_, value)| !value.is_empty());
    let width = shown().map(|(name, _)| name.len()).max().unwrap_or(0);
    shown().map(|(name, value)| format!("{name:width$}  {value}\n")).collect()
}

/// Puts `body`, indented, under `title`; nothing where there is no body.
pub(crate) fn section(title: &str, body: &str) -> String {
    if body.is_empty() {
        return String::new();
    }
    let lines = body.lines().map(|line| format!("  {line}\n")).collect::<String>();
    format!("\n{title}\n{lines}")
}
