# Entry of the ROM guest: reset vector, switch to 32-bit protected mode, copy of
# the payload to RAM, and the interrupt entry.
#
# The guest also has to run where KVM executes it through the kernel's own
# instruction emulator, which is why:
#   - no `iret` is used: interrupts are only taken at `hlt`, so the entry drops
#     the frame and starts over on an empty stack;
#   - the descriptors carry their accessed bit: the CPU would else write it into
#     this ROM;
#   - LVT0 and SVR are programmed here, since no firmware does it for us.

    .section .boot, "ax"
    .code16
    .globl boot
boot:
    cli
    xorw    %ax, %ax
    movw    %ax, %ss
    movw    $0x7000, %sp
    movw    $0xf000, %ax
    movw    %ax, %ds
    lgdtl   gdtr - boot
    movl    %cr0, %eax
    orl     $1, %eax
    movl    %eax, %cr0
    ljmpl   $8, $protected

    .code32
protected:
    movw    $16, %ax
    movw    %ax, %ds
    movw    %ax, %es
    movw    %ax, %ss
    movw    %ax, %fs
    movw    %ax, %gs
    inb     $0x92, %al                  # A20
    orb     $2, %al
    outb    %al, $0x92
    movl    $0x1ff, 0xfee000f0          # local APIC on, spurious vector 0xff
    movl    $0x700, 0xfee00350          # LVT0 = ExtINT: the PIC reaches the CPU
    cld
    movl    $payload_rom, %esi
    movl    $payload_start, %edi
    movl    $payload_dwords, %ecx
    rep movsl
    xorl    %eax, %eax                  # after a reset the RAM still holds the last run
    movl    $bss_start, %edi
    movl    $bss_dwords, %ecx
    rep stosl
    movl    $stack_top, %esp
    movl    $start_guest, %eax
    call    *%eax
    movl    $idle, %eax
    jmp     *%eax

    .align 8
gdt:
    .quad 0
    .quad 0x00cf9b000000ffff
    .quad 0x00cf93000000ffff
gdtr:
    .word 23
    .long gdt

    .section .reset, "ax"
    .code16
    ljmpw   $0xf000, $0
    .fill   11, 1, 0

    .section .text
    .code32
    .globl idle, timer_entry, other_entry
idle:
    sti
    hlt
    jmp     idle

timer_entry:
    movl    $stack_top, %esp
    movb    $0x20, %al
    outb    %al, $0x20
    call    handle_tick
    jmp     idle

other_entry:
    movl    $stack_top, %esp
    movb    $0x20, %al
    outb    %al, $0x20
    jmp     idle

    .section .bss
    .align 16
    .space 8192
stack_top:
    .section .note.GNU-stack, "", @progbits
