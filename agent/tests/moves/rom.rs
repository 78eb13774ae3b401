//! A guest that touches all of its memory, and hands the upper half back if it has a balloon.
//!
//! It needs no firmware and no driver: the code is at the reset vector. 64 MiB, machine type `pc`,
//! the balloon in slot 0x1e.

/// What touches all of a guest of 64 MiB, as it was assembled: the code, and its source.
#[rustfmt::skip] // A listing.
const TOUCHING: &[(&str, &str)] = &[
    // From real mode to 32 bits, all of memory in one segment, A20 on.
    ("", "start:"),
    ("fa", "cli"),
    ("2e660f0116f800", "lgdtl %cs:(gdtr - start)"),
    ("0f20c0", "movl %cr0, %eax"),
    ("0c01", "orb $1, %al"),
    ("0f22c0", "movl %eax, %cr0"),
    ("66ea1800ffff0800", "ljmpl $8, $0xffff0000 + (protected - start)"),
    ("", "protected:"),
    ("66b81000", "movw $16, %ax"),
    ("8ed8", "movw %ax, %ds"),
    ("8ec0", "movw %ax, %es"),
    ("e492", "inb $0x92, %al"),
    ("0c02", "orb $2, %al"),
    ("e692", "outb %al, $0x92"),
    ("bf00001000", "movl $0x100000, %edi"),
    // Write to each page from 1 MiB to 64 MiB.
    ("", "touch:"),
    ("893f", "movl %edi, (%edi)"),
    ("81c700100000", "addl $0x1000, %edi"),
    ("81ff00000004", "cmpl $0x4000000, %edi"),
    ("72f0", "jb touch"),
    ("b800f00080", "movl $0x8000f000, %eax"),
    ("66baf80c", "movw $0xcf8, %dx"),
    ("ef", "outl %eax, %dx"),
    ("66bafc0c", "movw $0xcfc, %dx"),
    ("ed", "inl %dx, %eax"),
    ("3df41a0210", "cmpl $0x10021af4, %eax"),
    ("0f8581000000", "jne halt"),
    ("b810f00080", "movl $0x8000f010, %eax"),
    ("66baf80c", "movw $0xcf8, %dx"),
    ("ef", "outl %eax, %dx"),
    ("b800c00000", "movl $0xc000, %eax"),
    ("66bafc0c", "movw $0xcfc, %dx"),
    ("ef", "outl %eax, %dx"),
    ("b804f00080", "movl $0x8000f004, %eax"),
    ("66baf80c", "movw $0xcf8, %dx"),
    ("ef", "outl %eax, %dx"),
    ("b805000000", "movl $5, %eax"),
    ("66bafc0c", "movw $0xcfc, %dx"),
    ("ef", "outl %eax, %dx"),
    ("66ba12c0", "movw $0xc012, %dx"),
    ("b003", "movb $3, %al"),
    ("ee", "outb %al, %dx"),
    ("66ba0ec0", "movw $0xc00e, %dx"),
    ("31c0", "xorl %eax, %eax"),
    ("66ef", "outw %ax, %dx"),
    ("66ba08c0", "movw $0xc008, %dx"),
    ("b800020000", "movl $0x200, %eax"),
    ("ef", "outl %eax, %dx"),
    ("bf00003000", "movl $0x300000, %edi"),
    ("b800200000", "movl $0x2000, %eax"),
    // Hand the upper half back: all of its page numbers in one descriptor.
    ("", "pages:"),
    ("ab", "stosl"),
    ("40", "incl %eax"),
    ("3d00400000", "cmpl $0x4000, %eax"),
    ("72f7", "jb pages"),
    ("c7050000200000003000", "movl $0x300000, 0x200000"),
    ("c7050800200000800000", "movl $0x8000, 0x200008"),
    ("c7050008200000000100", "movl $0x10000, 0x200800"),
    ("66ba12c0", "movw $0xc012, %dx"),
    ("b007", "movb $7, %al"),
    ("ee", "outb %al, %dx"),
    ("66ba10c0", "movw $0xc010, %dx"),
    ("31c0", "xorl %eax, %eax"),
    ("66ef", "outw %ax, %dx"),
    // Rest for ever.
    ("", "halt:"),
    ("f4", "hlt"),
    ("ebfd", "jmp halt"),
    ("8db42600000000", ".balign 8"),
    ("", "gdt:"),
    ("0000000000000000", ".quad 0"),
    ("ffff0000009bcf00", ".quad 0x00cf9b000000ffff"),
    ("ffff00000093cf00", ".quad 0x00cf93000000ffff"),
    ("", "gdtr:"),
    ("1700", ".word 23"),
    ("e000ffff", ".long 0xffff0000 + (gdt - start)"),
    ("", "end:"),
];

/// Where the code starts again, and with it every x86 processor.
const RESET: usize = 0xfff0;
/// The size of the image, which ends where 4 GiB do.
const SIZE: usize = 64 << 10;

/// A ROM that does nothing for ever: the guest needs no BIOS and is up at once.
pub(crate) fn idle() -> Vec<u8> {
    let mut rom = vec![0_u8; SIZE];
    // hlt; jmp back.
    rom[RESET..RESET + 3].copy_from_slice(&[0xf4, 0xeb, 0xfd]);
    rom
}

/// What answers the power button of machine type `pc`, as it was assembled, in real mode: the code, and
/// its source.
#[rustfmt::skip] // A listing.
const HEEDING: &[(&str, &str)] = &[
    // The power management of the PIIX4 at port 0xb000, enabled.
    ("66b8400b0080", "movl $0x80000b40, %eax"),
    ("baf80c", "movw $0xcf8, %dx"),
    ("66ef", "outl %eax, %dx"),
    ("66b801b00000", "movl $0xb001, %eax"),
    ("bafc0c", "movw $0xcfc, %dx"),
    ("66ef", "outl %eax, %dx"),
    ("66b8800b0080", "movl $0x80000b80, %eax"),
    ("baf80c", "movw $0xcf8, %dx"),
    ("66ef", "outl %eax, %dx"),
    ("bafc0c", "movw $0xcfc, %dx"),
    ("ec", "inb %dx, %al"),
    ("0c01", "orb $1, %al"),
    ("ee", "outb %al, %dx"),
    // Without the enable bit the press is not even recorded.
    ("ba02b0", "movw $0xb002, %dx"),
    ("b80001", "movw $0x100, %ax"),
    ("ef", "outw %ax, %dx"),
    ("", "wait:"),
    ("ba00b0", "movw $0xb000, %dx"),
    ("ed", "inw %dx, %ax"),
    ("f6c401", "testb $1, %ah"),
    ("74f7", "jz wait"),
    // SLP_EN, type 0: off.
    ("ba04b0", "movw $0xb004, %dx"),
    ("b80020", "movw $0x2000, %ax"),
    ("ef", "outw %ax, %dx"),
    ("", "off:"),
    ("f4", "hlt"),
    ("ebfd", "jmp off"),
];

/// A ROM that turns itself off at its power button.
pub(crate) fn heeding() -> Vec<u8> {
    assembled(HEEDING)
}

/// A ROM that touches all of 64 MiB, and hands 32 MiB of it back if there is a balloon.
pub(crate) fn touching() -> Vec<u8> {
    assembled(TOUCHING)
}

fn assembled(listing: &[(&str, &str)]) -> Vec<u8> {
    let mut rom: Vec<u8> = listing
        .iter()
        .flat_map(|(code, _)| code.as_bytes().chunks(2))
        .map(|digits| u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap())
        .collect();
    rom.resize(SIZE, 0);
    // jmp to the start, 16 bits of offset.
    let back = 0_u16.wrapping_sub(u16::try_from(RESET + 3).unwrap());
    rom[RESET] = 0xe9;
    rom[RESET + 1..RESET + 3].copy_from_slice(&back.to_le_bytes());
    rom
}

/// A ROM that touches all of 64 MiB once, and then goes on to write to the lowest `mib` of it, a page
/// after each `pause` turns of an empty loop.
pub(crate) fn writing(mib: u8, pause: u32) -> Vec<u8> {
    let mut rom = touching();
    let jb_touch = [0x72, 0xf0];
    let after = rom.windows(2).position(|code| code == jb_touch).unwrap() + 2;
    let end = (1 + u32::from(mib)) << 20;
    let mut code = vec![0xbf, 0, 0, 0x10, 0]; // again: movl $0x100000, %edi
    code.extend([0xff, 0x07, 0xb9]); // page: incl (%edi); movl $pause, %ecx
    code.extend(pause.to_le_bytes());
    code.extend([0xe2, 0xfe]); // loop to itself
    code.extend([0x81, 0xc7, 0, 0x10, 0, 0, 0x81, 0xff]); // addl $0x1000, %edi; cmpl $end, %edi
    code.extend(end.to_le_bytes());
    code.extend([0x72, 0xe9, 0xeb, 0xe2]); // jb page; jmp again
    rom[after..after + code.len()].copy_from_slice(&code);
    rom
}
