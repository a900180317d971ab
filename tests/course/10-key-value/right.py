import struct


def get(read_slot, words):
    def version():
        return struct.unpack("<Q", read_slot(0, 8))[0]

    while True:
        before = version()
        value = read_slot(8, 8 * words)
        if before % 2 == 0 and version() == before:
            return value
