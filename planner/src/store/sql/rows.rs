//! Columns to values, and the complaint about columns that hold none.

use sqlx::any::AnyRow;
use sqlx::{Any, Decode, Row as _, Type};
use vmferry_types::{HostId, MigrationId, VmId};

use crate::store::StoreError;

pub(super) fn get<'r, T>(row: &'r AnyRow, column: &'static str) -> Result<T, StoreError>
where
    T: Decode<'r, Any> + Type<Any>,
{
    row.try_get(column).map_err(|source| StoreError::Sql { operation: column, source })
}

/// Reads a count. The store writes no negative ones.
pub(super) fn uint(row: &AnyRow, column: &'static str) -> Result<u64, StoreError> {
    let value: i64 = get(row, column)?;
    u64::try_from(value).map_err(|_| corrupt(column, &value.to_string()))
}

pub(super) fn optional_uint(row: &AnyRow, column: &'static str) -> Result<Option<u64>, StoreError> {
    get::<Option<i64>>(row, column)?
        .map(|value| u64::try_from(value).map_err(|_| corrupt(column, &value.to_string())))
        .transpose()
}

/// Writes a count; a figure beyond what a column holds is kept at the greatest it does.
pub(super) fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Writes words of others, a QEMU's or a command's. PostgreSQL takes no text with a NUL in it, and
/// nothing may fail for what somebody said.
pub(super) fn words(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

pub(super) fn vm_id(text: &str) -> Result<VmId, StoreError> {
    text.parse().map_err(|_| corrupt("vm_id", text))
}

pub(super) fn host_id(text: &str) -> Result<HostId, StoreError> {
    text.parse().map_err(|_| corrupt("host", text))
}

pub(super) fn admission_id(text: &str) -> Result<MigrationId, StoreError> {
    text.parse().map_err(|_| corrupt("admission", text))
}

pub(super) fn corrupt(column: &'static str, value: &str) -> StoreError {
    StoreError::Corrupt { column, value: value.to_owned() }
}

/// Names the operation that a statement's failure belongs to.
pub(super) fn sql(operation: &'static str) -> impl Fn(sqlx::Error) -> StoreError {
    move |source| StoreError::Sql { operation, source }
}
