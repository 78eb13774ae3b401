/* The ROM guest: boots in a fraction of a second without firmware or operating
 * system, and notices when a migration loses anything.
 *
 * On every timer tick it walks on through a range of pages. Each page holds how
 * often it was written; a page that does not hold what was written last counts
 * as a memory error. It rewrites a ring of sectors on a virtio disk, if there is
 * one, reads back what it wrote, and reads the head of the ring before each
 * turn, so a second guest on the same disk is seen too. It answers the power
 * button by powering off, unless it is told to ignore it.
 *
 * Each `ticks_per_print` ticks it prints, all in hex:
 *
 *     T <boot id> <counter> <memory errors>
 *     T <boot id> <counter> <memory errors> <disk seq> <disk errors>   with a disk
 *
 * The boot id differs at every boot, so a guest that was restarted instead of
 * moved cannot pass for the same one.
 */
#include "disk_format.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define PAGE_SIZE 4096u

/* At file offset 0x1000 of the image, little endian; patch the file to change. */
struct params {
    char magic[8];
    u32 range_start;     /* bytes, page aligned, >= 2 MiB */
    u32 range_end;       /* bytes, page aligned, <= RAM */
    u32 pages_per_tick;  /* 0: an idle guest */
    u32 ticks_per_print; /* > 0 */
    u32 pit_divisor;     /* 1193182 Hz / divisor = tick rate */
    u32 disk_ticks;      /* ticks between two turns of the disk ring, 0: leave disks alone */
    u32 button;          /* 0: ignore the power button */
};

__attribute__((section(".params"), used)) const volatile struct params params = {
    {'V', 'F', 'R', 'O', 'M', '0', '0', '1'},
    0x200000, 0x1200000, 64, 1, 11932, 5, 1,
};

static inline void outb(u16 port, u8 value) { __asm__ volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }
static inline void outw(u16 port, u16 value) { __asm__ volatile("outw %0, %1" ::"a"(value), "Nd"(port)); }
static inline void outl(u16 port, u32 value) { __asm__ volatile("outl %0, %1" ::"a"(value), "Nd"(port)); }
static inline u8 inb(u16 port) { u8 v; __asm__ volatile("inb %1, %0" : "=a"(v) : "Nd"(port)); return v; }
static inline u16 inw(u16 port) { u16 v; __asm__ volatile("inw %1, %0" : "=a"(v) : "Nd"(port)); return v; }
static inline u32 inl(u16 port) { u32 v; __asm__ volatile("inl %1, %0" : "=a"(v) : "Nd"(port)); return v; }
static inline u32 rdtsc(void) { u32 lo, hi; __asm__ volatile("rdtsc" : "=a"(lo), "=d"(hi)); return lo; }
#define barrier() __asm__ volatile("" ::: "memory")

static u32 boot_id, counter, memory_errors, ticks_since_print;

/* ---- serial ---- */

#define COM1 0x3f8

static void put_char(char c)
{
    while (!(inb(COM1 + 5) & 0x20))
        ;
    outb(COM1, (u8)c);
}

static void put_hex(u32 value)
{
    int shift = 28;
    while (shift > 0 && !(value >> shift))
        shift -= 4;
    for (; shift >= 0; shift -= 4)
        put_char("0123456789abcdef"[(value >> shift) & 15]);
}

/* ---- PCI ---- */

static u32 pci_address(u32 device, u32 function, u32 reg)
{
    return 0x80000000u | device << 11 | function << 8 | reg;
}
static u32 pci_read(u32 device, u32 function, u32 reg)
{
    outl(0xcf8, pci_address(device, function, reg));
    return inl(0xcfc);
}
static void pci_write(u32 device, u32 function, u32 reg, u32 value)
{
    outl(0xcf8, pci_address(device, function, reg));
    outl(0xcfc, value);
}

/* ---- power button ---- */

#define PM_BASE 0x600

static void start_power_button(void)
{
    if (pci_read(1, 3, 0) == 0x71138086) { /* pc: PIIX4 */
        pci_write(1, 3, 0x40, PM_BASE | 1);
        pci_write(1, 3, 0x80, pci_read(1, 3, 0x80) | 1);
    } else { /* q35: ICH9 */
        pci_write(31, 0, 0x40, PM_BASE | 1);
        pci_write(31, 0, 0x44, pci_read(31, 0, 0x44) | 0x80);
    }
    outw(PM_BASE + 2, 0x100); /* without the enable bit the press is not even recorded */
}

static void poll_power_button(void)
{
    if (params.button && inw(PM_BASE) & 0x100)
        outw(PM_BASE + 4, 0x2000); /* SLP_EN, type 0: soft off */
}

/* ---- memory ---- */

static u32 page_at, pass;

static void check_pages(void)
{
    for (u32 n = params.pages_per_tick; n; n--) {
        volatile u32 *page = (volatile u32 *)page_at;
        if (pass && (page[0] != pass || page[1023] != (pass ^ boot_id)))
            memory_errors++;
        page[0] = pass + 1;
        page[1023] = (pass + 1) ^ boot_id;
        page_at += PAGE_SIZE;
        if (page_at >= params.range_end) {
            page_at = params.range_start;
            pass++;
        }
    }
}

/* ---- disk: a legacy virtio-blk driver with one request in flight ---- */

#define VIRTIO_IO 0xc000
#define QUEUE_SIZE_MAX 1024
#define NEXT 1
#define DEVICE_WRITES 2

struct descriptor { u64 address; u32 length; u16 flags, next; };
struct request_header { u32 kind, reserved; u64 sector; };

static u8 ring_memory[32768] __attribute__((aligned(4096)));
static struct descriptor *descriptors;
static volatile u16 *available, *used;
static u16 queue_size, submitted;
static struct request_header header;
static volatile u8 request_status;
static struct disk_record record, readback;

enum disk_step { NO_DISK, RESTING, READING_HEAD, WRITING_RING, READING_RING, WRITING_HEAD };
static enum disk_step disk_step;
static u32 disk_seq, disk_errors, disk_rest;

static void start_disk(void)
{
    u32 device = 0;
    while (device < 32 && pci_read(device, 0, 0) != 0x10011af4)
        device++;
    if (device == 32 || !params.disk_ticks)
        return;
    pci_write(device, 0, 0x10, VIRTIO_IO);
    pci_write(device, 0, 0x04, 5); /* I/O ports, bus master */
    outb(VIRTIO_IO + 18, 0);
    outb(VIRTIO_IO + 18, 3);
    outl(VIRTIO_IO + 4, 0); /* no flush offered: QEMU then writes through */
    outw(VIRTIO_IO + 14, 0);
    queue_size = inw(VIRTIO_IO + 12);
    if (!queue_size || queue_size > QUEUE_SIZE_MAX)
        return;
    descriptors = (struct descriptor *)ring_memory;
    available = (u16 *)(ring_memory + 16 * queue_size);
    used = (u16 *)(((u32)available + 6 + 2 * queue_size + PAGE_SIZE - 1) & ~(PAGE_SIZE - 1));
    outl(VIRTIO_IO + 8, (u32)ring_memory / PAGE_SIZE);
    outb(VIRTIO_IO + 18, 7);
    disk_step = RESTING;
}

static void submit(enum disk_step step, u32 kind, u32 sector, void *data)
{
    disk_step = step;
    header.kind = kind;
    header.sector = sector;
    request_status = 0xff;
    descriptors[0] = (struct descriptor){(u32)&header, sizeof header, NEXT, 1};
    descriptors[1] = (struct descriptor){(u32)data, 512, kind ? NEXT : NEXT | DEVICE_WRITES, 2};
    descriptors[2] = (struct descriptor){(u32)&request_status, 1, DEVICE_WRITES, 0};
    available[2 + submitted % queue_size] = 0;
    barrier();
    available[1] = ++submitted;
    barrier();
    outw(VIRTIO_IO + 16, 0);
}

static void fill_record(u32 seq)
{
    for (u32 i = 0; i < 8; i++) {
        record.magic[i] = DISK_MAGIC[i];
        record.boot_id[i] = "0123456789abcdef"[(boot_id >> (28 - 4 * i)) & 15];
    }
    record.seq = seq;
    record.seq_inverted = ~(u64)seq;
}

static int holds(const struct disk_record *found, u32 seq)
{
    for (u32 i = 0; i < 8; i++)
        if (found->magic[i] != DISK_MAGIC[i] || found->boot_id[i] != record.boot_id[i])
            return 0;
    return found->seq == seq && found->seq_inverted == ~(u64)seq;
}

/* Goes on with the ring once the request in flight is over; never waits. */
static void step_disk(void)
{
    if (disk_step == NO_DISK)
        return;
    if (disk_step == RESTING) {
        if (++disk_rest < params.disk_ticks)
            return;
        disk_rest = 0;
        submit(READING_HEAD, 0, DISK_HEAD_SECTOR, &readback);
        return;
    }
    if (used[1] != submitted)
        return;
    barrier();
    if (request_status)
        disk_errors++;
    u32 ring_sector = DISK_RING_SECTOR + (disk_seq + 1) % DISK_RING_SECTORS;
    switch (disk_step) {
    case READING_HEAD:
        if (disk_seq && !holds(&readback, disk_seq))
            disk_errors++;
        fill_record(disk_seq + 1);
        submit(WRITING_RING, 1, ring_sector, &record);
        break;
    case WRITING_RING:
        submit(READING_RING, 0, ring_sector, &readback);
        break;
    case READING_RING:
        if (!holds(&readback, disk_seq + 1))
            disk_errors++;
        submit(WRITING_HEAD, 1, DISK_HEAD_SECTOR, &record);
        break;
    case WRITING_HEAD:
        disk_seq++;
        disk_step = RESTING;
        break;
    case NO_DISK:
    case RESTING:
        break;
    }
}

/* ---- start and tick ---- */

static u8 cmos(u8 reg)
{
    outb(0x70, reg);
    return inb(0x71);
}

/* The TSC starts near zero at every boot, the wall clock does not. */
static u32 mint_boot_id(void)
{
    u32 id = rdtsc() * 2654435761u;
    for (u8 reg = 0; reg < 10; reg++)
        id = (id ^ cmos(reg)) * 16777619u;
    return id | 0x10000000u; /* always eight digits */
}

struct gate { u16 low, selector, kind, high; };
static struct gate gates[256];
extern void timer_entry(void), other_entry(void);

static void start_interrupts(void)
{
    for (u32 i = 0; i < 256; i++) {
        u32 entry = (u32)(i == 0x20 ? timer_entry : other_entry);
        gates[i] = (struct gate){(u16)entry, 8, 0x8e00, (u16)(entry >> 16)};
    }
    struct { u16 limit; u32 base; } __attribute__((packed)) idt = {sizeof gates - 1, (u32)gates};
    __asm__ volatile("lidtl %0" ::"m"(idt));
    outb(0x20, 0x11); outb(0xa0, 0x11);
    outb(0x21, 0x20); outb(0xa1, 0x28);
    outb(0x21, 4);    outb(0xa1, 2);
    outb(0x21, 1);    outb(0xa1, 1);
    outb(0x21, 0xfe); outb(0xa1, 0xff); /* only the timer */
    outb(0x43, 0x34);
    outb(0x40, (u8)params.pit_divisor);
    outb(0x40, (u8)(params.pit_divisor >> 8));
}

void start_guest(void)
{
    boot_id = mint_boot_id();
    page_at = params.range_start;
    start_power_button();
    start_disk();
    start_interrupts();
}

void handle_tick(void)
{
    poll_power_button();
    check_pages();
    step_disk();
    counter++;
    if (++ticks_since_print < params.ticks_per_print)
        return;
    ticks_since_print = 0;
    put_char('T');
    put_char(' ');
    put_hex(boot_id);
    put_char(' ');
    put_hex(counter);
    put_char(' ');
    put_hex(memory_errors);
    if (disk_step != NO_DISK) {
        put_char(' ');
        put_hex(disk_seq);
        put_char(' ');
        put_hex(disk_errors);
    }
    put_char('\n');
}
