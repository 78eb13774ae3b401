//! Values that nobody means.

use super::dice::Dice;

/// Returns a text that breaks something somewhere.
pub fn text(dice: &mut Dice) -> String {
    const TEXTS: [&str; 22] = [
        "",
        "\0",
        "a\0b",
        "..",
        "../../../../etc/passwd",
        "/",
        "/proc/self/mem",
        "%00",
        "%2e%2e%2f",
        "a\r\nX-Injected: yes",
        "'; DROP TABLE vms; --",
        "$(reboot)",
        "{}{0}%s%n",
        "\u{202e}\u{feff}\u{fffd}",
        "00000000-0000-0000-0000-000000000000",
        "01234567-89ab-cdef-0123-456789abcdeg",
        "-1",
        "NaN",
        "18446744073709551616",
        "true",
        "-S",
        "unix:/tmp/x,server",
    ];
    match dice.below(12) {
        0 => "x".repeat(1 << dice.below(17)),
        1 => "é".repeat(dice.length(4000)),
        2 => dice.uuid().to_string(),
        _ => dice.pick(&TEXTS).to_owned(),
    }
}

/// Returns a number at an edge.
pub fn number(dice: &mut Dice) -> u64 {
    const EDGES: [u64; 11] = [
        0,
        1,
        u64::MAX,
        u64::MAX - 1,
        i64::MAX.cast_unsigned(),
        1 << 63,
        1 << 53,
        1 << 32,
        (1 << 32) - 1,
        1 << 31,
        65_536,
    ];
    if dice.below(4) == 0 { dice.next() } else { dice.pick(&EDGES) }
}

/// Returns a small number at an edge.
pub fn small(dice: &mut Dice) -> u32 {
    dice.pick(&[0, 1, 65_535, 65_536, u32::MAX, 1 << 31])
}

/// Returns a counter that no fence of a known VM takes: none, or further than anybody counts.
pub fn leap(dice: &mut Dice) -> u64 {
    dice.pick(&[0, u64::MAX, i64::MAX.cast_unsigned(), 1 << 63, 1 << 40])
}

/// Returns bytes that may or may not be protobuf: fields of any number and kind, nested.
pub fn protobuf(dice: &mut Dice, depth: u32) -> Vec<u8> {
    let mut out = Vec::new();
    for _ in 0..dice.below(6) {
        let number = 1 + dice.below(40);
        let kind = if dice.below(20) == 0 { dice.below(8) } else { dice.pick(&[0, 1, 2, 2, 5]) };
        varint(&mut out, (number << 3) | kind);
        match kind {
            0 => varint(&mut out, number_of(dice)),
            1 => out.extend(dice.bytes(8)),
            2 => delimited(&mut out, dice, depth),
            5 => out.extend(dice.bytes(4)),
            _ => {}
        }
    }
    out
}

const fn number_of(dice: &mut Dice) -> u64 {
    dice.next() >> dice.below(64)
}

fn delimited(out: &mut Vec<u8>, dice: &mut Dice, depth: u32) {
    let content = match dice.below(3) {
        0 if depth > 0 => protobuf(dice, depth - 1),
        1 => text(dice).into_bytes(),
        // What is no UTF-8 most of the time.
        _ => {
            let count = dice.length(40);
            dice.bytes(count)
        }
    };
    let length = u64::try_from(content.len()).unwrap_or_default();
    let claimed = if dice.below(10) == 0 { number(dice) } else { length };
    varint(out, claimed);
    out.extend(content);
}

/// Returns a message that is nested deeper than anybody reads: one field in itself.
#[must_use]
pub fn nested(levels: usize) -> Vec<u8> {
    let mut inner: Vec<u8> = Vec::new();
    for _ in 0..levels {
        let mut outer = vec![0x0a];
        varint(&mut outer, u64::try_from(inner.len()).unwrap_or_default());
        outer.extend(inner);
        inner = outer;
    }
    inner
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    loop {
        let low = value.to_le_bytes()[0] & 0x7f;
        value >>= 7;
        if value == 0 {
            out.push(low);
            return;
        }
        out.push(low | 0x80);
    }
}
