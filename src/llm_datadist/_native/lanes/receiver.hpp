// Receiving half of a lane.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>

#include "crypto/encrypted.hpp"
#include "lanes/payload.hpp"
#include "lanes/wire.hpp"

namespace datadist {

// Measured: a wake-up for each segment of a payload costs a third of the speed.
constexpr std::uint64_t low_water_bytes = 256u << 10;

// header -> meta -> [paused ->] payload -> [trailer ->] header ...: the lane decides the stage.
class Receiver {
public:
    enum class Stage : std::uint8_t { header, meta, payload, trailer, paused };

    Stage stage() const { return stage_; }
    bool paused() const { return stage_ == Stage::paused; }
    bool between_frames() const { return stage_ == Stage::header && have_ == 0; }

    void expect_header() {
        stage_ = Stage::header;
        have_ = 0;
        payload_.reset();
        meta_ = std::string();  // frees its capacity: the peer chose it
    }

    void expect_meta(std::uint64_t bytes) {
        stage_ = Stage::meta;
        have_ = 0;
        meta_.resize(static_cast<std::size_t>(bytes));
    }

    void expect_payload(std::shared_ptr<Payload> payload, bool trailer) {
        stage_ = Stage::payload;
        have_ = 0;
        payload_ = std::move(payload);
        trailer_follows_ = trailer;
    }

    // Keeps trailer bytes that came with the payload.
    void expect_trailer() { stage_ = Stage::trailer; }

    void pause() { stage_ = Stage::paused; }

    // True if the stage has all its bytes.
    bool complete() const {
        switch (stage_) {
            case Stage::header: return have_ == header_bytes;
            case Stage::meta: return have_ == meta_.size();
            case Stage::payload: return payload_->left() == 0 && !payload_->waits();
            case Stage::trailer: return have_ == trailer_bytes;
            case Stage::paused: break;
        }
        return false;
    }

    const char* header() const { return small_.data(); }
    std::string& meta() { return meta_; }
    std::uint64_t trailer() const { return load<std::uint64_t>(small_.data()); }
    // True while the device of the payload's memory is not ready, or has all bytes: no input ends that.
    bool waits() const {
        return stage_ == Stage::payload && payload_->on_device() && (payload_->left() == 0 || payload_->waits());
    }
    bool discarding() const { return stage_ == Stage::payload && payload_->detached(); }

    struct Step {
        std::uint64_t moved;
        bool drained;  // less came than was asked for
    };

    // Bytes to wait for before a wake-up: many in a long payload.
    std::uint64_t low_water() const {
        if (stage_ != Stage::payload) return 1;
        return std::min(payload_->left() + (trailer_follows_ ? trailer_bytes : 0), low_water_bytes);
    }

    // Receives once, at most `budget` payload bytes. Throws LaneError on errors and at the end of the stream.
    Step step(Stream& stream, std::uint64_t budget, const Scrap& scrap) {
        iovec parts[max_iovecs];
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = describe(parts, budget, scrap);
        if (waits()) return {0, true};
        std::uint64_t asked = 0;
        for (std::size_t i = 0; i < message.msg_iovlen; ++i) asked += parts[i].iov_len;
        const ssize_t got = stream.receive(message, stage_ != Stage::payload || payload_->mapped());
        if (got == 0) break_lane("the peer closed the connection");
        if (got < 0) {
            if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {0, true};
            break_lane("receiving failed: ", std::strerror(errno));
        }
        account(static_cast<std::uint64_t>(got));
        return {static_cast<std::uint64_t>(got), static_cast<std::uint64_t>(got) < asked && !stream.has_input()};
    }

private:
    std::size_t describe(iovec* parts, std::uint64_t budget, const Scrap& scrap) {
        switch (stage_) {
            case Stage::meta: parts[0] = {meta_.data() + have_, meta_.size() - have_}; return 1;
            case Stage::payload: return describe_payload(parts, budget, scrap);
            case Stage::trailer: parts[0] = {small_.data() + have_, trailer_bytes - have_}; return 1;
            case Stage::header:
            case Stage::paused: break;
        }
        parts[0] = {small_.data() + have_, header_bytes - have_};
        return 1;
    }

    std::size_t describe_payload(iovec* parts, std::uint64_t budget, const Scrap& scrap) {
        std::size_t used = 1;
        landing_ = payload_->staged() ? payload_->landing(scrap) : Scrap{};
        if (payload_->staged())
            parts[0] = {landing_.begin, std::min<std::size_t>({budget, payload_->left(), landing_.bytes})};
        else
            used = payload_->fill(parts, max_iovecs - 1, budget, scrap);
        std::uint64_t described = 0;
        for (std::size_t i = 0; i < used; ++i) described += parts[i].iov_len;
        if (trailer_follows_ && described == payload_->left()) parts[used++] = {small_.data(), trailer_bytes};
        return used;
    }

    void account(std::uint64_t got) {
        if (stage_ == Stage::payload) {
            const std::uint64_t body = std::min(got, payload_->left());
            payload_->staged() ? payload_->put(landing_.begin, body) : payload_->advance(body);
            got -= body;
        }
        have_ += static_cast<std::size_t>(got);
    }

    Stage stage_ = Stage::header;
    std::size_t have_ = 0;  // of header, meta or trailer
    std::array<char, header_bytes> small_{};
    std::string meta_;
    std::shared_ptr<Payload> payload_;
    Scrap landing_{};  // of the bytes that come, if they are staged
    bool trailer_follows_ = false;
};

}  // namespace datadist
