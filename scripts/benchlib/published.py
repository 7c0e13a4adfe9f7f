"""What the Lamassu paper (Shah and So, USENIX ATC 2015) reports, as far as its text gives numbers; and the SAN.FS report's tables."""

# Section 4.2, Figure 8, RAM disk: LamassuFS ÷ EncFS. "83.2% worse", "47% worse"; of writes "EncFS performs 26.8% to 27.5% better".
FIGURE8_OF_ENCFS = {"seq-read 4K": 0.168, "rand-read 4K": 0.53, "seq-write 4K": 1 / 1.268, "rand-write 4K": 1 / 1.275}
# The same, LamassuFS (meta-only) ÷ EncFS: "22.8% worse", "8.1% better".
FIGURE8_METADATA_OF_ENCFS = {"seq-read 4K": 0.772, "rand-read 4K": 1.081}
# The same, LamassuFS ÷ PlainFS: "16.70x over LamassuFS".
FIGURE8_OF_PLAINFS = {"seq-read 4K": 1 / 16.70}
# Section 4.1, Figure 6: space overhead over plain files after deduplication, percent, by the percentage of redundant blocks.
FIGURE6_OVERHEAD = {10: 1.01, 20: 1.06, 30: 1.21, 40: 1.43, 50: 1.81}
# Table 1: (PlainFS deduplicated %, LamassuFS deduplicated %, space overhead %) of five virtual machine images.
TABLE1 = [(9.35, 9.18, 1.07), (15.40, 15.11, 1.35), (22.07, 21.95, 1.01), (36.73, 36.46, 1.83), (8.08, 7.87, 1.14)]
# Section 4.2, Figure 7, NFS: LamassuFS ÷ EncFS. "1.6% to 12.4% worse" of reads; writes "32.9% for seq-write and 32.2% for rand-write".
FIGURE7_OF_ENCFS = {"seq-write": 1 - 0.329, "rand-write": 1 - 0.322, "seq-read": 0.93, "rand-read": 0.93}
# Section 4.2, Figure 9: GetCEKey's part of the latency. Without full integrity "the read latency reduces drastically (81%)".
FIGURE9_KEY = {"seq-write": 0.58, "seq-read": 0.80}
FIGURE9_READ_SAVED = 0.81
# Section 4.3, Figure 10: the change from R = 1 to R = 48 (writes, the peak) and to R = 60 (reads).
FIGURE10 = {"seq-write": (48, 1.60), "rand-write": (48, 1.57), "seq-read": (60, 1 - 0.0471), "rand-read": (60, 1 - 0.0440)}

# The SAN.FS report, Table 2: what integrity (a hash tree by SHA-256) changes for a large file in sequence, percent.
SANFS_TABLE2 = {"write": -3.66, "read": -36.19}
# Table 3, Postmark: what AES-128 changes without integrity, and integrity with it, percent.
SANFS_TABLE3 = {"encryption": -8.0, "integrity": -27.1}
# The same in Mbit/s: (cipher, without integrity, with).
SANFS_POSTMARK = [("no encryption", 219, 156), ("AES-128", 202, 147), ("AES-256", 198, 141)]
# Figures 5 to 7, as far as the text gives numbers: what encryption costs, percent, least and most.
SANFS_FIGURES = {"clients": ("more than 48 clients, AES-128 and AES-256", 13, 17), "cipher-threads": ("three threads and more", 28, 44), "postmark-size": ("at any size", 0, 10)}

# The ZFS articles. openssl speed of aes-128-cbc, blocks of 8 KiB, SPARC T4, MB/s: with and without the processor's own instructions.
ZFS_AES = (1019, 89)
# `mkfile 100g` on a deduplicating pool before and after a faster SHA-256, seconds.
ZFS_DEDUP = {"X4140": (214.386, 145.387), "T5120": (520.704, 340.594)}

# The multi-tenant study, MB/s of 4 KiB: without encryption, software, the device one request at a time, its pipeline. The last is a rate of ciphers.
STUDY = {"plainfs": 198, "library": 102, "device-sync": 101, "device": 367}
