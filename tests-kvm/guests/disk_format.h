/* What the test guests leave on a disk, and what the lane checks there.
 *
 * Sector 0 is the head: the record that was written last. Sectors 1..64 are a
 * ring: the record of `seq` is in sector 1 + seq % 64. A turn reads the head,
 * writes the ring, reads it back and writes the head. All little endian. */
#ifndef DISK_FORMAT_H
#define DISK_FORMAT_H

#define DISK_MAGIC "VFRING01"
#define DISK_HEAD_SECTOR 0
#define DISK_RING_SECTOR 1
#define DISK_RING_SECTORS 64

struct disk_record {
    char magic[8];
    char boot_id[32]; /* as printed on the serial port, padded with zeroes */
    unsigned long long seq;
    unsigned long long seq_inverted;
    char unused[456];
};

#endif
