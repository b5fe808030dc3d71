// What carries a lane's bytes: a stream socket, plain or sealed. Sealed, all bytes go in records that are encrypted and
// authenticated with AES-256-GCM, under one key for each direction:
//
//   u32 length of the plaintext, little-endian; the additional authenticated data
//   ciphertext, as long, 1 byte to 64 KiB
//   tag, 16 bytes
//
// The nonce of a record is its number, so that one that was changed, left out, repeated or moved has a wrong tag. Bytes
// of a record are handed out once its tag was found right.
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

#include "fd.hpp"
#include "libcrypto.hpp"
#include "wire.hpp"

namespace datadist {

constexpr std::size_t key_bytes = 32;
constexpr std::size_t tag_bytes = 16;
constexpr std::size_t length_bytes = 4;
constexpr std::size_t max_record_bytes = 64u << 10;  // of plaintext
constexpr std::size_t record_overhead = length_bytes + tag_bytes;
constexpr std::uint64_t max_records = std::uint64_t{1} << 32;  // under one key
// Eight whole records: what is handed to the kernel, or taken from it, at once. Measured: with four, wake-ups cost more
// than a tenth of what the ciphers do.
constexpr std::size_t sealed_buffer_bytes = 8 * (max_record_bytes + record_overhead);
// Below this a piece of memory is copied, and encrypted together with others: a call of OpenSSL costs as much.
constexpr std::size_t cipher_piece_bytes = 1024;

// The keys of one end of a lane. Each holder wipes its copy.
struct LaneKeys {
    std::array<char, key_bytes> send{};
    std::array<char, key_bytes> receive{};

    ~LaneKeys() {
        ::explicit_bzero(send.data(), key_bytes);
        ::explicit_bzero(receive.data(), key_bytes);
    }
};

// One direction's cipher. The key lives in OpenSSL's context alone, and is wiped with it.
class RecordCipher {
public:
    // `first`: the number of the first record, not 0 only in tests of the limit.
    RecordCipher(const std::array<char, key_bytes>& key, bool seals, std::uint64_t first = 0)
        : crypto_(Libcrypto::get()), context_(crypto_.new_context()), number_(first) {
        if (context_ == nullptr) throw std::bad_alloc();
        if (crypto_.init(context_, crypto_.aes_256_gcm(), nullptr, bytes(key.data()), nullptr, seals ? 1 : 0) != 1) {
            crypto_.free_context(context_);
            crypto_.clear_errors();
            refuse("keys: ", libcrypto_name, " has no AES-256-GCM");
        }
    }
    ~RecordCipher() { crypto_.free_context(context_); }

    RecordCipher(const RecordCipher&) = delete;
    RecordCipher& operator=(const RecordCipher&) = delete;

    // Begins the next record; `length` is as it is on the wire.
    void begin(const char* length) {
        if (number_ >= max_records) break_lane("all 2**32 records of a sealed lane's key are used");
        unsigned char nonce[12] = {};
        for (std::size_t i = 0; i < sizeof number_; ++i) nonce[i] = static_cast<unsigned char>(number_ >> (8 * i));
        ++number_;
        require(crypto_.init(context_, nullptr, nullptr, nullptr, nonce, -1));
        int out;
        require(crypto_.update(context_, nullptr, &out, bytes(length), length_bytes));
    }

    // Goes on with the record; `to` may be `from`.
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

    // Throws LaneError unless the record is as it was sealed.
    void check_tag(const char* tag) {
        unsigned char expected[tag_bytes], nothing[tag_bytes];
        std::memcpy(expected, tag, tag_bytes);
        require(crypto_.control(context_, Libcrypto::set_tag, tag_bytes, expected));
        int out;
        if (crypto_.final(context_, nothing, &out) == 1) return;
        crypto_.clear_errors();
        break_lane("a sealed record is not as the peer sent it");
    }

private:
    static Libcrypto::Bytes bytes(const char* from) { return reinterpret_cast<Libcrypto::Bytes>(from); }
    static unsigned char* bytes(char* to) { return reinterpret_cast<unsigned char*>(to); }

    void require(int result) const {
        if (result == 1) return;
        crypto_.clear_errors();  // they are the thread's, which may use OpenSSL for something else
        break_lane("a record could not be sealed or opened");
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

// Memory in order, of which the first bytes are taken off again and again. Changes the iovecs.
class Pieces {
public:
    Pieces(iovec* first, std::size_t count) : at_(first), end_(first + count) {
        for (const iovec* piece = at_; piece != end_; ++piece) left_ += piece->iov_len;
    }

    std::size_t left() const { return left_; }

    // Calls use(address, bytes) for the first `bytes` bytes, piece by piece, and takes them off.
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

    // Has the kernel move the first `bytes` bytes by call(iovecs, count), and takes them off. False when it did not.
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

    // Are the first `bytes` bytes in pieces large enough to be encrypted or decrypted one by one?
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

// One record's bytes on their way to or from memory that its user may unmap: where a copy of ours would end the
// process, the kernel says EFAULT.
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
    Fd fd_{checked(::memfd_create("lldd-transit", MFD_CLOEXEC), "memfd_create")};
    char* data_ = nullptr;
};

// What the sealed lanes of one worker share: buffers, which a lane has only while there is something in them.
class SealingSpace {
public:
    using Buffer = std::unique_ptr<char[]>;

    SealingSpace() { free_.reserve(most_free); }  // so that give() cannot fail

    Buffer take() {
        if (free_.empty()) return Buffer(new char[sealed_buffer_bytes]);
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

    // Gives all back, while there is no lane.
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

// The sealing direction: plaintext becomes records in a buffer, which goes to the kernel.
class SealedOutput {
public:
    SealedOutput(RecordCipher& cipher, SealingSpace& space) : cipher_(cipher), space_(space) {}
    ~SealedOutput() { space_.give(std::move(buffer_)); }

    bool empty() const { return begin_ == end_; }

    void unblock() { blocked_ = false; }

    // Hands the buffer to the kernel; false while that takes no more.
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
        space_.give(std::move(buffer_));
        return true;
    }

    // As sendmsg(): returns how many bytes it took, or -1 and errno. The first `head` bytes are a record of their own.
    ssize_t send(int fd, Pieces from, std::size_t head, bool mapped) {
        if (!has_room() && !flush(fd)) return failed(EAGAIN);
        std::size_t taken = 0;
        while (from.left() > 0 && has_room()) {
            const std::size_t whole = taken < head ? head - taken : from.left();
            const std::size_t bytes = std::min({from.left(), max_record_bytes, whole});
            if (!seal(from, bytes, mapped)) return failed(EFAULT);
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

    bool has_room() const { return sealed_buffer_bytes - end_ >= max_record_bytes + record_overhead; }

    // Appends one record of the first `bytes` bytes; false when they cannot be read.
    bool seal(Pieces& from, std::size_t bytes, bool mapped) {
        if (!buffer_) buffer_ = space_.take();
        char* const length = buffer_.get() + end_;
        char* const body = length + length_bytes;
        for (std::size_t i = 0; i < length_bytes; ++i) length[i] = static_cast<char>(bytes >> (8 * i));
        if (!mapped && !space_.transit().fetch(from, bytes)) return false;
        cipher_.begin(length);
        if (!mapped) {
            cipher_.update(body, space_.transit().data(), bytes);
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
    SealingSpace& space_;
    SealingSpace::Buffer buffer_;
    std::size_t begin_ = 0, end_ = 0;  // of what the kernel has not taken yet
    bool blocked_ = false;
};

// The opening direction: records come from the kernel into a buffer, and their plaintext is handed out in order.
class SealedInput {
public:
    SealedInput(RecordCipher& cipher, SealingSpace& space) : cipher_(cipher), space_(space) {}
    ~SealedInput() { space_.give(std::move(buffer_)); }

    // True when bytes can be had without the kernel, which does not tell of them.
    bool has_bytes() const { return plain_begin_ != plain_end_ || has_record(); }

    // Bytes of a record that is not whole yet.
    std::size_t begun() const { return has_bytes() ? 0 : end_ - begin_; }

    // As recvmsg(): returns how many bytes there were, 0 at the end of the stream, or -1 and errno.
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

    // What the kernel said by `got`, which is no bytes, after `moved` bytes.
    ssize_t ended(ssize_t got, std::size_t moved) {
        const int code = errno;
        if (got == 0 && moved == 0 && begin_ != end_)
            break_lane("the peer closed the connection inside a sealed record");
        give_back();
        if (moved > 0) return static_cast<ssize_t>(moved);  // the next call says the rest
        errno = code;
        return got;
    }

    void give_back() {
        if (begin_ != end_ || plain_begin_ != plain_end_) return;
        begin_ = end_ = plain_begin_ = plain_end_ = 0;
        space_.give(std::move(buffer_));
    }

    // Returns how many bytes may be received behind what is there. Only without plaintext in hand.
    std::size_t make_room() {
        if (!buffer_) buffer_ = space_.take();
        if (begin_ > 0) {
            std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
            end_ -= std::exchange(begin_, 0);
        }
        plain_begin_ = plain_end_ = 0;
        return sealed_buffer_bytes - end_;
    }

    std::size_t record_length() const { return load<std::uint32_t>(buffer_.get() + begin_); }

    bool has_record() const {
        const std::size_t here = end_ - begin_;
        return here >= length_bytes && here >= std::min(record_length(), max_record_bytes) + record_overhead;
    }

    // Hands out what there is. False when the memory could not be written.
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

    // As soon as it is there: it may be of a record that never comes.
    void check_length() const {
        if (end_ - begin_ < length_bytes) return;
        const std::size_t length = record_length();
        if (length == 0 || length > max_record_bytes) break_lane("a sealed record of ", length, " bytes");
    }

    // Opens the next record: into its place, or in the buffer, where it waits to be handed out.
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
        char* const opened = fits && !mapped ? space_.transit().data() : body;
        cipher_.update(opened, body, bytes);
        cipher_.check_tag(body + bytes);
        if (opened != body) return space_.transit().deliver(to, bytes);
        plain_begin_ = static_cast<std::size_t>(body - buffer_.get());
        plain_end_ = plain_begin_ + bytes;
        return true;
    }

    bool hand_out(Pieces& to, bool mapped) {
        const std::size_t bytes = std::min(to.left(), plain_end_ - plain_begin_);
        const char* from = buffer_.get() + plain_begin_;
        plain_begin_ += bytes;
        if (!mapped) {
            std::memcpy(space_.transit().data(), from, bytes);
            return space_.transit().deliver(to, bytes);
        }
        to.take(bytes, [&](char* piece, std::size_t count) {
            std::memcpy(piece, from, count);
            from += count;
        });
        return true;
    }

    RecordCipher& cipher_;
    SealingSpace& space_;
    SealingSpace::Buffer buffer_;
    std::size_t plain_begin_ = 0, plain_end_ = 0;  // plaintext in the buffer, in front of:
    std::size_t begin_ = 0, end_ = 0;              // what was received and not opened
    bool unreadable_ = false;
};

// What carries a lane's bytes. `mapped` means that the memory cannot be unmapped meanwhile, see Payload.
class Stream {
public:
    // Plain without ciphers.
    Stream(Fd fd, std::unique_ptr<LaneCiphers> ciphers, SealingSpace& space) : fd_(std::move(fd)) {
        if (ciphers) sealed_ = std::make_unique<Sealed>(std::move(ciphers), space);
    }

    int fd() const { return fd_.get(); }

    // As sendmsg(). Sealed bytes that wait here for the kernel count as sent. The first `head` bytes are no part of the
    // records that follow, so that the peer can open these where they belong.
    ssize_t send(const msghdr& message, int flags, std::size_t head, bool mapped) {
        if (!sealed_) return ::sendmsg(fd_.get(), &message, flags);
        return sealed_->output.send(fd_.get(), Pieces(message.msg_iov, message.msg_iovlen), head, mapped);
    }

    // Hands the kernel what waits here; false while that takes no more. Throws LaneError.
    bool flush() { return !sealed_ || sealed_->output.flush(fd_.get()); }

    // True while something waits here for the kernel.
    bool has_output() const { return sealed_ && !sealed_->output.empty(); }

    // The kernel has room again.
    void unblock() {
        if (sealed_) sealed_->output.unblock();
    }

    // As recvmsg(), without waiting.
    ssize_t receive(msghdr& message, bool mapped) {
        if (!sealed_) return ::recvmsg(fd_.get(), &message, MSG_DONTWAIT);
        return sealed_->input.receive(fd_.get(), Pieces(message.msg_iov, message.msg_iovlen), mapped);
    }

    // True when bytes are here that no epoll tells of.
    bool has_input() const { return sealed_ && sealed_->input.has_bytes(); }

    // What to ask for at least, so that a record finds place where it belongs.
    std::uint64_t least_asked() const { return sealed_ ? max_record_bytes : 0; }

    // How many bytes the kernel is sure to get when `bytes` bytes of plaintext are still to come: less than that, where
    // part of their record is here.
    std::uint64_t to_come(std::uint64_t bytes) const {
        const std::uint64_t begun = sealed_ ? sealed_->input.begun() : 0;
        return bytes > begun ? bytes - begun : 1;
    }

private:
    struct Sealed {
        Sealed(std::unique_ptr<LaneCiphers> both, SealingSpace& space)
            : ciphers(std::move(both)), output(ciphers->send, space), input(ciphers->receive, space) {}

        std::unique_ptr<LaneCiphers> ciphers;
        SealedOutput output;
        SealedInput input;
    };

    Fd fd_;
    std::unique_ptr<Sealed> sealed_;
};

}  // namespace datadist
