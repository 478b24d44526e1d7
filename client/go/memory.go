package blobd

import (
	"math"
	"syscall"
)

// blob is a descriptor from the daemon. It is mapped once, when first needed, read-only and shared, so
// its pages are those of the page cache. The length comes from the kernel (fstat) and not from the
// daemon, so no byte is beyond the end of the file, where access would kill the program. The daemon is
// trusted not to shrink a file that it has handed out.
type blob struct {
	number int
	fd     int // -1 once it is closed.
	data   []byte
	mapped bool
}

// hugePageBytes is the size that one entry of the second page-table level covers.
const hugePageBytes = 2 << 20

func (b *blob) slice(offset, size uint64) ([]byte, error) {
	if err := b.mapWhole(); err != nil {
		return nil, err
	}
	length := uint64(len(b.data))
	if offset > length || size > length-offset {
		return nil, fail(ErrShort, "descriptor %d: length of its file: expected %d bytes, found %d; run `blobd verify`",
			b.number, offset+size, length)
	}
	return b.data[offset : offset+size : offset+size], nil
}

func (b *blob) mapWhole() error {
	if b.mapped {
		return nil
	}
	var status syscall.Stat_t
	if err := syscall.Fstat(b.fd, &status); err != nil {
		return b.failed(err)
	}
	if status.Mode&syscall.S_IFMT != syscall.S_IFREG {
		return fail(ErrMap, "descriptor %d: not a regular file; is that a blobd daemon?", b.number)
	}
	if status.Size > math.MaxInt {
		return b.failed(syscall.ENOMEM)
	}
	if status.Size > 0 {
		data, err := syscall.Mmap(b.fd, 0, int(status.Size), syscall.PROT_READ, syscall.MAP_SHARED)
		if err != nil {
			return b.failed(err)
		}
		b.data = data
	}
	if len(b.data) >= hugePageBytes {
		// Harmless if it fails: the kernel may lack huge pages.
		_ = syscall.Madvise(b.data, syscall.MADV_HUGEPAGE)
	}
	b.mapped = true
	return nil
}

func (b *blob) failed(err error) error {
	return &failure{kind: ErrMap, cause: err, text: fail(ErrMap,
		"descriptor %d: cannot be mapped: %v; the process may have too many maps: see /proc/sys/vm/max_map_count",
		b.number, err).Error()}
}

func (b *blob) close() {
	if b.fd >= 0 {
		syscall.Close(b.fd)
		b.fd = -1
	}
}

func (b *blob) unmap() error {
	data := b.data
	b.data = nil
	if len(data) == 0 {
		return nil
	}
	return syscall.Munmap(data)
}
