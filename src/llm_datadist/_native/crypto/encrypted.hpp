// A lane's stream, plain or encrypted: then records under AES-256-GCM, with a key for each direction.
//
//   u32 length of the plaintext, little-endian; the additional authenticated data
//   ciphertext, as long, 1 byte to 64 KiB
//   tag, 16 bytes
//
// A record's number is its nonce, so a changed, missing, repeated or moved record has a wrong tag. No byte counts as
// received before its record's tag is verified.
#pragma once

#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "crypto/libcrypto.hpp"
#include "error.hpp"
#include "fd.hpp"
#include "little_endian.hpp"

namespace datadist {

constexpr std::size_t key_bytes = 32;
constexpr std::size_t tag_bytes = 16;
constexpr std::size_t length_bytes = 4;
constexpr std::size_t max_record_bytes = 64u << 10;  // of plaintext
constexpr std::size_t record_overhead = length_bytes + tag_bytes;
constexpr std::uint64_t max_records = std::uint64_t{1} << 32;  // under one key
// Eight whole records for one system call. Measured: with four, wake-ups cost over a tenth of the ciphers' time.
constexpr std::size_t records_buffer_bytes = 8 * (max_record_bytes + record_overhead);
// Smaller pieces, on average, are copied and encrypted together: a call of OpenSSL costs as much as the copy.
constexpr std::size_t cipher_piece_bytes = 1024;

// Each copy of the keys is wiped.
struct LaneKeys {
    std::array<char, key_bytes> send{};
    std::array<char, key_bytes> receive{};

    ~LaneKeys() {
        ::explicit_bzero(send.data(), key_bytes);
        ::explicit_bzero(receive.data(), key_bytes);
    }
};

// Cipher of one direction. OpenSSL's context holds the key and wipes it.
class RecordCipher {
public:
    // `first`: number of the first record, for tests of the limit.
    RecordCipher(const std::array<char, key_bytes>& key, bool encrypts, std::uint64_t first = 0)
        : crypto_(Libcrypto::get()), context_(crypto_.new_context()), number_(first) {
        if (context_ == nullptr) throw std::bad_alloc();
        if (crypto_.init(context_, crypto_.aes_256_gcm(), nullptr, bytes(key.data()), nullptr, encrypts ? 1 : 0) != 1) {
            crypto_.free_context(context_);
            crypto_.clear_errors();
            refuse("keys: ", libcrypto_name, " has no AES-256-GCM");
        }
    }
    ~RecordCipher() { crypto_.free_context(context_); }

    RecordCipher(const RecordCipher&) = delete;
    RecordCipher& operator=(const RecordCipher&) = delete;

    // Begins the next record, with its length as on the wire.
    void begin(const char* length) {
        if (number_ >= max_records) break_lane("all 2**32 records of an encrypted lane's key are used");
        unsigned char nonce[12] = {};
        for (std::size_t i = 0; i < sizeof number_; ++i) nonce[i] = static_cast<unsigned char>(number_ >> (8 * i));
        ++number_;
        require(crypto_.init(context_, nullptr, nullptr, nullptr, nonce, -1));
        int out;
        require(crypto_.update(context_, nullptr, &out, bytes(length), length_bytes));
    }

    // Continues the record; `to` may be `from`.
    void update(char* to, const char* from, std::size_t count) {
        int out;
        require(crypto_.update(context_, bytes(to), &out, bytes(from), static_cast<int>(count)));
    }

    void write_tag(char* tag) {
        unsigned char nothing[tag_bytes];
        int out;
        require(crypto_.final(context_, nothing, &out));
        require(crypto_.control(context_, Libcrypto::get_tag, tag_bytes, tag));
    }

    // Throws LaneError if the record was changed.
    void check_tag(const char* tag) {
        unsigned char expected[tag_bytes], nothing[tag_bytes];
        std::memcpy(expected, tag, tag_bytes);
        require(crypto_.control(context_, Libcrypto::set_tag, tag_bytes, expected));
        int out;
        if (crypto_.final(context_, nothing, &out) == 1) return;
        crypto_.clear_errors();
        break_lane("an encrypted record is not as the peer sent it");
    }

private:
    static Libcrypto::Bytes bytes(const char* from) { return reinterpret_cast<Libcrypto::Bytes>(from); }
    static unsigned char* bytes(char* to) { return reinterpret_cast<unsigned char*>(to); }

    void require(int result) const {
        if (result == 1) return;
        crypto_.clear_errors();  // other users of OpenSSL on this thread would find them
        break_lane("a record could not be encrypted or decrypted");
    }

    const Libcrypto& crypto_;
    void* context_;
    std::uint64_t number_;
};

struct LaneCiphers {
    explicit LaneCiphers(const LaneKeys& keys) : send(keys.send, true), receive(keys.receive, false) {}

    RecordCipher send;
    RecordCipher receive;
};

// Memory consumed from the front. Changes the iovecs.
class Pieces {
public:
    Pieces(iovec* first, std::size_t count) : at_(first), end_(first + count) {
        for (const iovec* piece = at_; piece != end_; ++piece) left_ += piece->iov_len;
    }

    std::size_t left() const { return left_; }

    // Consumes `bytes` bytes by use(address, bytes), piece by piece.
    template <typename Use>
    void take(std::size_t bytes, Use&& use) {
        left_ -= bytes;
        while (bytes > 0) {
            const std::size_t step = std::min(bytes, at_->iov_len);
            if (step > 0) use(static_cast<char*>(at_->iov_base), step);
            bytes -= step;
            shorten(step);
        }
    }

    // Consumes `bytes` bytes by one system call; false if it moved another number.
    template <typename Call>
    bool move(std::size_t bytes, Call&& call) {
        std::size_t before = 0;
        iovec* last = at_;
        while (before + last->iov_len < bytes) before += (last++)->iov_len;
        const std::size_t whole = std::exchange(last->iov_len, bytes - before);
        const ssize_t moved = call(at_, static_cast<int>(last - at_ + 1));
        last->iov_len = whole;
        if (moved != static_cast<ssize_t>(bytes)) return false;
        take(bytes, [](char*, std::size_t) {});
        return true;
    }

    // True if these bytes are in pieces large enough for single cipher calls.
    bool coarse(std::size_t bytes) const {
        std::size_t count = 0, seen = 0;
        for (const iovec* piece = at_; seen < bytes; ++piece, ++count) seen += piece->iov_len;
        return count * cipher_piece_bytes <= bytes || count <= 1;
    }

private:
    void shorten(std::size_t bytes) {
        at_->iov_base = static_cast<char*>(at_->iov_base) + bytes;
        at_->iov_len -= bytes;
        if (at_->iov_len == 0) ++at_;
    }

    iovec* at_;
    iovec* end_;
    std::size_t left_ = 0;
};

// Not executable, which vm.memfd_noexec=2 may require.
inline int new_memfd(const char* name) {
    constexpr unsigned noexec_seal = 8;  // MFD_NOEXEC_SEAL, since Linux 6.3
    const int fd = ::memfd_create(name, MFD_CLOEXEC | noexec_seal);
    return fd < 0 && errno == EINVAL ? ::memfd_create(name, MFD_CLOEXEC) : fd;
}

// Buffer between the cipher and memory that users may unmap: the kernel copies, and reports EFAULT.
class Transit {
public:
    Transit() {
        checked(::fchmod(fd_.get(), 0600), "fchmod");
        checked(::ftruncate(fd_.get(), max_record_bytes), "ftruncate");
        void* mapped = ::mmap(nullptr, max_record_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
        if (mapped == MAP_FAILED) checked(-1, "mmap");
        data_ = static_cast<char*>(mapped);
    }
    ~Transit() { ::munmap(data_, max_record_bytes); }

    Transit(const Transit&) = delete;
    Transit& operator=(const Transit&) = delete;

    int fd() const { return fd_.get(); }
    char* data() { return data_; }

    bool fetch(Pieces& from, std::size_t bytes) {
        return from.move(bytes, [this](iovec* parts, int count) { return ::pwritev(fd_.get(), parts, count, 0); });
    }
    bool deliver(Pieces& to, std::size_t bytes) {
        return to.move(bytes, [this](iovec* parts, int count) { return ::preadv(fd_.get(), parts, count, 0); });
    }

private:
    Fd fd_{checked(new_memfd("lldd-transit"), "memfd_create")};
    char* data_ = nullptr;
};

// Buffers of one thread's encrypted lanes; a lane holds one only while it has content.
class CipherBuffers {
public:
    using Buffer = std::unique_ptr<char[]>;

    CipherBuffers() { free_.reserve(most_free); }  // so that give() cannot fail

    Buffer take() {
        if (free_.empty()) return Buffer(new char[records_buffer_bytes]);
        Buffer buffer = std::move(free_.back());
        free_.pop_back();
        return buffer;
    }

    void give(Buffer buffer) {
        if (buffer && free_.size() < most_free) free_.push_back(std::move(buffer));
    }

    Transit& transit() {
        if (!transit_) transit_ = std::make_unique<Transit>();
        return *transit_;
    }

    // Requires that no lane exists.
    void clear() {
        free_.clear();
        transit_.reset();
    }

    void close_in_child() {
        if (transit_) ::close(transit_->fd());
    }

private:
    static constexpr std::size_t most_free = 4;

    std::vector<Buffer> free_;
    std::unique_ptr<Transit> transit_;
};

// Sending direction.
class EncryptedOutput {
public:
    EncryptedOutput(RecordCipher& cipher, CipherBuffers& buffers) : cipher_(cipher), buffers_(buffers) {}
    ~EncryptedOutput() { buffers_.give(std::move(buffer_)); }

    bool empty() const { return begin_ == end_; }

    void unblock() { blocked_ = false; }

    // False if the kernel does not take all.
    bool flush(int fd) {
        while (!empty() && !blocked_) {
            const ssize_t sent = ::send(fd, buffer_.get() + begin_, end_ - begin_, MSG_NOSIGNAL | MSG_DONTWAIT);
            if (sent >= 0)
                begin_ += static_cast<std::size_t>(sent);
            else if (errno == EAGAIN || errno == EWOULDBLOCK)
                blocked_ = true;
            else if (errno != EINTR)
                break_lane("sending failed: ", std::strerror(errno));
        }
        if (!empty()) return false;
        begin_ = end_ = 0;
        buffers_.give(std::move(buffer_));
        return true;
    }

    // As sendmsg(). The first `head` bytes get their own record.
    ssize_t send(int fd, Pieces from, std::size_t head, bool mapped) {
        if (!has_room() && !flush(fd)) return failed(EAGAIN);
        std::size_t taken = 0;
        while (from.left() > 0 && has_room()) {
            const std::size_t whole = taken < head ? head - taken : from.left();
            const std::size_t bytes = std::min({from.left(), max_record_bytes, whole});
            if (!encrypt(from, bytes, mapped)) return failed(EFAULT);
            taken += bytes;
        }
        if (!has_room()) flush(fd);
        return static_cast<ssize_t>(taken);
    }

private:
    static ssize_t failed(int code) {
        errno = code;
        return -1;
    }

    bool has_room() const { return records_buffer_bytes - end_ >= max_record_bytes + record_overhead; }

    // Appends one record; false if its memory is unreadable.
    bool encrypt(Pieces& from, std::size_t bytes, bool mapped) {
        if (!buffer_) buffer_ = buffers_.take();
        char* const length = buffer_.get() + end_;
        char* const body = length + length_bytes;
        for (std::size_t i = 0; i < length_bytes; ++i) length[i] = static_cast<char>(bytes >> (8 * i));
        if (!mapped && !buffers_.transit().fetch(from, bytes)) return false;
        cipher_.begin(length);
        if (!mapped) {
            cipher_.update(body, buffers_.transit().data(), bytes);
        } else if (char* to = body; from.coarse(bytes)) {
            from.take(bytes, [&](const char* piece, std::size_t count) {
                cipher_.update(to, piece, count);
                to += count;
            });
        } else {
            from.take(bytes, [&](const char* piece, std::size_t count) { to = std::copy_n(piece, count, to); });
            cipher_.update(body, body, bytes);
        }
        cipher_.write_tag(body + bytes);
        end_ += bytes + record_overhead;
        return true;
    }

    RecordCipher& cipher_;
    CipherBuffers& buffers_;
    CipherBuffers::Buffer buffer_;
    std::size_t begin_ = 0, end_ = 0;  // not taken by the kernel
    bool blocked_ = false;
};

// Receiving direction; delivers plaintext in order.
class EncryptedInput {
public:
    EncryptedInput(RecordCipher& cipher, CipherBuffers& buffers) : cipher_(cipher), buffers_(buffers) {}
    ~EncryptedInput() { buffers_.give(std::move(buffer_)); }

    // True if bytes are here, which no epoll reports.
    bool has_bytes() const { return plain_begin_ != plain_end_ || has_record(); }

    // Bytes of an incomplete record.
    std::size_t begun() const { return has_bytes() ? 0 : end_ - begin_; }

    // As recvmsg().
    ssize_t receive(int fd, Pieces to, bool mapped) {
        const std::size_t wanted = to.left();
        bool more = true;
        while (open_all(to, mapped)) {
            if (to.left() == 0 || !more) break;
            const std::size_t room = make_room();
            const ssize_t got = ::recv(fd, buffer_.get() + end_, room, MSG_DONTWAIT);
            if (got <= 0) return ended(got, wanted - to.left());
            end_ += static_cast<std::size_t>(got);
            more = static_cast<std::size_t>(got) == room;
        }
        if (unreadable_) return failed(EFAULT);
        give_back();
        return wanted == to.left() ? failed(EAGAIN) : static_cast<ssize_t>(wanted - to.left());
    }

private:
    static ssize_t failed(int code) {
        errno = code;
        return -1;
    }

    // Result after `moved` bytes if recv() returned `got` <= 0.
    ssize_t ended(ssize_t got, std::size_t moved) {
        const int code = errno;
        if (got == 0 && moved == 0 && begin_ != end_)
            break_lane("the peer closed the connection inside an encrypted record");
        give_back();
        if (moved > 0) return static_cast<ssize_t>(moved);  // the next call reports the rest
        errno = code;
        return got;
    }

    void give_back() {
        if (begin_ != end_ || plain_begin_ != plain_end_) return;
        begin_ = end_ = plain_begin_ = plain_end_ = 0;
        buffers_.give(std::move(buffer_));
    }

    // Returns the room. Requires that no plaintext is left.
    std::size_t make_room() {
        if (!buffer_) buffer_ = buffers_.take();
        if (begin_ > 0) {
            std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
            end_ -= std::exchange(begin_, 0);
        }
        plain_begin_ = plain_end_ = 0;
        return records_buffer_bytes - end_;
    }

    std::size_t record_length() const { return load<std::uint32_t>(buffer_.get() + begin_); }

    bool has_record() const {
        const std::size_t here = end_ - begin_;
        return here >= length_bytes && here >= std::min(record_length(), max_record_bytes) + record_overhead;
    }

    // False if the memory is not writable.
    bool open_all(Pieces& to, bool mapped) {
        while (to.left() > 0) {
            if (plain_begin_ != plain_end_) {
                if (!hand_out(to, mapped)) return !(unreadable_ = true);
                continue;
            }
            check_length();
            if (!has_record()) return true;
            if (!open(to, mapped)) return !(unreadable_ = true);
        }
        return true;
    }

    // Checked early: the rest of the record may never come.
    void check_length() const {
        if (end_ - begin_ < length_bytes) return;
        const std::size_t length = record_length();
        if (length == 0 || length > max_record_bytes) break_lane("an encrypted record of ", length, " bytes");
    }

    // Decrypts the next record to its destination, or in the buffer for later.
    bool open(Pieces& to, bool mapped) {
        char* const body = buffer_.get() + begin_ + length_bytes;
        const std::size_t bytes = record_length();
        const bool fits = bytes <= to.left();
        cipher_.begin(buffer_.get() + begin_);
        begin_ += bytes + record_overhead;
        if (fits && mapped && to.coarse(bytes)) {
            const char* from = body;
            to.take(bytes, [&](char* piece, std::size_t count) {
                cipher_.update(piece, from, count);
                from += count;
            });
            cipher_.check_tag(body + bytes);
            return true;
        }
        char* const opened = fits && !mapped ? buffers_.transit().data() : body;
        cipher_.update(opened, body, bytes);
        cipher_.check_tag(body + bytes);
        if (opened != body) return buffers_.transit().deliver(to, bytes);
        plain_begin_ = static_cast<std::size_t>(body - buffer_.get());
        plain_end_ = plain_begin_ + bytes;
        return true;
    }

    bool hand_out(Pieces& to, bool mapped) {
        const std::size_t bytes = std::min(to.left(), plain_end_ - plain_begin_);
        const char* from = buffer_.get() + plain_begin_;
        plain_begin_ += bytes;
        if (!mapped) {
            std::memcpy(buffers_.transit().data(), from, bytes);
            return buffers_.transit().deliver(to, bytes);
        }
        to.take(bytes, [&](char* piece, std::size_t count) {
            std::memcpy(piece, from, count);
            from += count;
        });
        return true;
    }

    RecordCipher& cipher_;
    CipherBuffers& buffers_;
    CipherBuffers::Buffer buffer_;
    std::size_t plain_begin_ = 0, plain_end_ = 0;  // plaintext in the buffer, before:
    std::size_t begin_ = 0, end_ = 0;              // received, not decrypted
    bool unreadable_ = false;
};

// Byte stream of a lane. `mapped`: as in Payload.
class Stream {
public:
    Stream(Fd fd, std::unique_ptr<LaneCiphers> ciphers, CipherBuffers& buffers) : fd_(std::move(fd)) {
        if (ciphers) encrypted_ = std::make_unique<Encrypted>(std::move(ciphers), buffers);
    }

    int fd() const { return fd_.get(); }

    // As sendmsg(). Buffered encrypted bytes count as sent. The first `head` bytes get their own record, so the peer
    // can decrypt later ones in place.
    ssize_t send(const msghdr& message, int flags, std::size_t head, bool mapped) {
        if (!encrypted_) return ::sendmsg(fd_.get(), &message, flags);
        return encrypted_->output.send(fd_.get(), Pieces(message.msg_iov, message.msg_iovlen), head, mapped);
    }

    // Sends buffered bytes; false if some are left. Throws LaneError.
    bool flush() { return !encrypted_ || encrypted_->output.flush(fd_.get()); }

    bool has_output() const { return encrypted_ && !encrypted_->output.empty(); }

    void unblock() {
        if (encrypted_) encrypted_->output.unblock();
    }

    // As recvmsg() with MSG_DONTWAIT.
    ssize_t receive(msghdr& message, bool mapped) {
        if (!encrypted_) return ::recvmsg(fd_.get(), &message, MSG_DONTWAIT);
        return encrypted_->input.receive(fd_.get(), Pieces(message.msg_iov, message.msg_iovlen), mapped);
    }

    bool has_input() const { return encrypted_ && encrypted_->input.has_bytes(); }

    // Least bytes to ask for, so that a record fits at its destination.
    std::uint64_t least_asked() const { return encrypted_ ? max_record_bytes : 0; }

    // Bytes the kernel will surely get while `bytes` bytes of plaintext are missing; part of their record may be here.
    std::uint64_t to_come(std::uint64_t bytes) const {
        const std::uint64_t begun = encrypted_ ? encrypted_->input.begun() : 0;
        return bytes > begun ? bytes - begun : 1;
    }

private:
    struct Encrypted {
        Encrypted(std::unique_ptr<LaneCiphers> both, CipherBuffers& buffers)
            : ciphers(std::move(both)), output(ciphers->send, buffers), input(ciphers->receive, buffers) {}

        std::unique_ptr<LaneCiphers> ciphers;
        EncryptedOutput output;
        EncryptedInput input;
    };

    Fd fd_;
    std::unique_ptr<Encrypted> encrypted_;
};

}  // namespace datadist
