/* PID 1 of the Linux guest; statically linked, the only program in there.
 *
 * The kernel hands it the unknown words of its command line as environment:
 *
 *     FILL_MIB    memory to fill with incompressible data (0)
 *     DIRTY_MIBS  MiB per second of it that are rewritten, a page at a time (0)
 *     WS_MIB      how much of it is rewritten (all)
 *     TICK_MS     time between two lines on the serial port (10)
 *     DISK        disk to write to (/dev/vda, if there is one)
 *     DISK_MS     time between two turns of the disk ring (40)
 *     NET         address of eth0, "10.0.0.9/24"; the kernel then answers pings
 *
 * It loads the modules of /modules in the order of /modules/order, and prints
 *
 *     T <boot id> <seq> <guest us> <disk seq> <disk errors> <memory errors>
 *
 * in decimal, but for the boot id. A page that does not hold what was last
 * written to it is a memory error. The disk ring is described in disk_format.h.
 * The power button powers the guest off.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/input.h>
#include <linux/reboot.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include "disk_format.h"

#define PAGE 4096UL
#define MIB (1024UL * 1024UL)
#define SLICE_US 10000

/* What the processes below tell the one that prints. */
struct shared {
    volatile uint64_t disk_seq, disk_errors, memory_errors;
};

static struct shared *shared;
static char boot_id[33];

static long number(const char *name, long otherwise)
{
    const char *value = getenv(name);
    return value ? atol(value) : otherwise;
}

static int64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

/* Sleeps until *next, which moves on by one period; a late caller does not catch up. */
static void sleep_period(int64_t *next, int64_t period_us)
{
    *next += period_us;
    if (*next < now_us())
        *next = now_us();
    struct timespec t = {*next / 1000000, (*next % 1000000) * 1000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
}

static void *pages(size_t bytes)
{
    void *m = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m == MAP_FAILED) {
        printf("E mmap of %zu bytes: %s\n", bytes, strerror(errno));
        _exit(1);
    }
    return m;
}

static void load_modules(void)
{
    FILE *order = fopen("/modules/order", "r");
    char name[64], path[96];
    while (order && fscanf(order, "%63s", name) == 1) {
        snprintf(path, sizeof path, "/modules/%s.ko", name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || syscall(SYS_finit_module, fd, "", 0) < 0)
            printf("E module %s: %s\n", name, strerror(errno));
        if (fd >= 0)
            close(fd);
    }
    if (order)
        fclose(order);
}

static void read_boot_id(void)
{
    char text[64] = "";
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC), n = 0;
    if (fd < 0 || read(fd, text, sizeof text - 1) < 36)
        printf("E boot id: %s\n", strerror(errno));
    close(fd);
    for (char *c = text; *c && n < 32; c++)
        if (*c != '-' && *c != '\n')
            boot_id[n++] = *c;
}

static void start_network(const char *address)
{
    char text[64];
    snprintf(text, sizeof text, "%s", address);
    char *slash = strchr(text, '/');
    int bits = slash ? atoi(slash + 1) : 24;
    if (slash)
        *slash = 0;
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq request = {.ifr_name = "eth0"};
    struct sockaddr_in *in = (struct sockaddr_in *)&request.ifr_addr;
    in->sin_family = AF_INET;
    inet_pton(AF_INET, text, &in->sin_addr);
    int failed = ioctl(fd, SIOCSIFADDR, &request) < 0;
    in->sin_addr.s_addr = htonl(bits ? ~0U << (32 - bits) : 0);
    failed |= ioctl(fd, SIOCSIFNETMASK, &request) < 0;
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    failed |= ioctl(fd, SIOCSIFFLAGS, &request) < 0;
    if (failed)
        printf("E eth0 %s: %s\n", address, strerror(errno));
    close(fd);
}

static void run_power_button(void)
{
    struct pollfd polled[8];
    int count = 0;
    for (int i = 0; i < 8; i++) {
        char path[32];
        snprintf(path, sizeof path, "/dev/input/event%d", i);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0)
            polled[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
    while (count && poll(polled, count, -1) > 0)
        for (int i = 0; i < count; i++) {
            struct input_event event;
            if (!(polled[i].revents & POLLIN) || read(polled[i].fd, &event, sizeof event) <= 0)
                continue;
            if (event.type == EV_KEY && event.code == KEY_POWER && event.value == 1) {
                sync();
                reboot(RB_POWER_OFF);
            }
        }
    _exit(0);
}

static int holds(const struct disk_record *found, uint64_t seq)
{
    return !memcmp(found->magic, DISK_MAGIC, 8) && !memcmp(found->boot_id, boot_id, 32) &&
           found->seq == seq && found->seq_inverted == ~seq;
}

static void run_disk(const char *path, long every_ms)
{
    int fd = open(path, O_RDWR | O_DIRECT | O_DSYNC | O_CLOEXEC);
    if (fd < 0)
        _exit(0);
    struct disk_record *record = pages(PAGE), *readback = pages(PAGE);
    int64_t next = now_us();
    for (uint64_t seq = 1;; seq++) {
        off_t ring = (DISK_RING_SECTOR + seq % DISK_RING_SECTORS) * 512;
        memcpy(record->magic, DISK_MAGIC, 8);
        memcpy(record->boot_id, boot_id, 32);
        record->seq = seq;
        record->seq_inverted = ~seq;
        int good = pread(fd, readback, 512, DISK_HEAD_SECTOR * 512) == 512 &&
                   (seq == 1 || holds(readback, seq - 1));
        good = pwrite(fd, record, 512, ring) == 512 && good;
        good = pread(fd, readback, 512, ring) == 512 && holds(readback, seq) && good;
        good = pwrite(fd, record, 512, DISK_HEAD_SECTOR * 512) == 512 && good;
        if (!good)
            shared->disk_errors++;
        shared->disk_seq = seq;
        sleep_period(&next, every_ms * 1000);
    }
}

/* Word 3 of a page holds how often it was written, word 500 the same with the
 * page's number mixed in; the rest makes it incompressible. */
static void run_memory(long fill_mib, long mib_per_second, long working_set_mib)
{
    size_t count = fill_mib * MIB / PAGE;
    uint64_t(*page)[PAGE / 8] = pages(fill_mib * MIB), x = 88172645463325252ULL;
    for (size_t p = 0; p < count; p++) {
        for (int i = 0; i < 16; i++) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            page[p][i * 32] = x;
        }
        page[p][3] = 0;
        page[p][500] = p;
    }
    printf("FILLED %ld\n", fill_mib);
    if (working_set_mib <= 0 || working_set_mib > fill_mib)
        working_set_mib = fill_mib;
    size_t working_set = working_set_mib * MIB / PAGE, at = 0;
    size_t per_slice = mib_per_second * MIB / PAGE * SLICE_US / 1000000;
    int64_t next = now_us();
    for (uint64_t pass = 0; per_slice;) {
        for (size_t i = 0; i < per_slice; i++) {
            if (page[at][3] != pass || page[at][500] != (pass ^ at))
                shared->memory_errors++;
            page[at][3] = pass + 1;
            page[at][500] = (pass + 1) ^ at;
            if (++at == working_set)
                at = 0, pass++;
        }
        sleep_period(&next, SLICE_US);
    }
    for (;;)
        pause();
}

static void take_serial(void)
{
    int fd = open("/dev/ttyS0", O_RDWR | O_NOCTTY);
    struct termios t;
    if (fd < 0)
        return;
    tcgetattr(fd, &t);
    cfmakeraw(&t);
    cfsetspeed(&t, B115200);
    tcsetattr(fd, TCSANOW, &t);
    dup2(fd, 0), dup2(fd, 1), dup2(fd, 2);
    setvbuf(stdout, NULL, _IOLBF, 256);
}

int main(void)
{
    mount("dev", "/dev", "devtmpfs", 0, NULL);
    mount("proc", "/proc", "proc", 0, NULL);
    take_serial();
    reboot(LINUX_REBOOT_CMD_CAD_OFF);
    load_modules();
    read_boot_id();
    shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    const char *disk = getenv("DISK"), *net = getenv("NET");
    long fill = number("FILL_MIB", 0), tick_ms = number("TICK_MS", 10);
    if (net)
        start_network(net);
    if (fork() == 0)
        run_power_button();
    if (fork() == 0)
        run_disk(disk ? disk : "/dev/vda", number("DISK_MS", 40));
    if (fill > 0 && fork() == 0)
        run_memory(fill, number("DIRTY_MIBS", 0), number("WS_MIB", 0));
    /* The heartbeat must not wait for the dirtier. */
    sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){50});
    int64_t next = now_us();
    for (uint64_t seq = 1;; seq++) {
        char line[128];
        int length = snprintf(line, sizeof line, "T %s %llu %lld %llu %llu %llu\n", boot_id,
                              (unsigned long long)seq, (long long)now_us(),
                              (unsigned long long)shared->disk_seq,
                              (unsigned long long)shared->disk_errors,
                              (unsigned long long)shared->memory_errors);
        if (write(1, line, length) < 0)
            return 1;
        sleep_period(&next, tick_ms * 1000);
    }
}
