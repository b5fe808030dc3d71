// One lane: a stream socket that carries jobs of both sides at once. Used by one thread at a time (lane_thread.hpp).
//
// Our job:        waiting (for the window) -> queued -> sent -> [receiving] -> its ticket is finished
// Peer's request: asked (by an event, unless the reply is cached) -> answering -> answered
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "crypto/encrypted.hpp"
#include "fd.hpp"
#include "lanes/events.hpp"
#include "lanes/receiver.hpp"
#include "lanes/reply_cache.hpp"
#include "lanes/sender.hpp"
#include "ticket.hpp"

namespace datadist {

// Limits of one side's unanswered requests on a lane. Ours wait; a peer that exceeds them loses the lane.
constexpr std::size_t window_jobs = 32;
constexpr std::uint64_t window_meta_bytes = 4u << 20;

// Job of this side.
struct Job {
    Kind kind;
    std::uint64_t id;
    std::string meta;
    std::shared_ptr<Payload> payload;
    std::shared_ptr<Ticket> ticket;
    bool sent = false;  // its whole frame
};

// Reply of the memory's owner to a request of the peer.
struct Reply {
    std::uint64_t id;
    std::shared_ptr<Payload> payload;
    Guards guards;
    std::int64_t tag;
};

class Lane {
public:
    // `max_drain_ns`: time limit for discarding a payload. `replies`: cached replies, or null.
    Lane(std::uint64_t number, Stream stream, EventQueue& events, Scrap scrap, std::int64_t max_drain_ns,
         std::shared_ptr<ReplyCache> replies)
        : number_(number),
          stream_(std::move(stream)),
          events_(events),
          scrap_(scrap),
          max_drain_ns_(max_drain_ns),
          replies_(std::move(replies)) {}

    int fd() const { return stream_.fd(); }

    bool wants_to_read() const { return !receiver_.paused() && !receiver_.waits(); }
    bool wants_to_write() const { return (!sender_.idle() && !sender_.waits()) || stream_.has_output(); }

    // True while a device is not ready; on_device() goes on.
    bool waits_for_device() const { return receiver_.waits() || sender_.waits(); }

    bool has_input() const { return wants_to_read() && stream_.has_input(); }

    // Deadline of the payload being discarded.
    std::optional<std::int64_t> drains_until() const {
        return receiver_.discarding() ? std::optional(drain_until_) : std::nullopt;
    }

    // Events of the socket. All throw LaneError if the lane breaks.

    // Receives until the socket is empty or a frame has ended. Another frame is rarely there: an epoll_wait costs less
    // than a futile recv after each. For bytes that the stream holds see has_input().
    void receive() {
        std::uint64_t budget = slice_bytes;
        bool moved = false, drained = false;
        while (true) {
            enter_next_stages();
            if (receiver_.paused() || drained || budget == 0 ||
                (moved && receiver_.between_frames() && !stream_.has_input()))
                return set_low_water();
            const Receiver::Step step = receiver_.step(stream_, std::max(budget, stream_.least_asked()), scrap_);
            moved = true;
            drained = step.drained;
            budget -= std::min(budget, std::max(step.moved, least_charge_bytes));
        }
    }

    void on_room() {
        sender_.unblock();
        stream_.unblock();
    }

    void on_device() {
        enter_next_stages();
        if (wants_to_read()) receive();
    }

    void send(std::uint64_t budget) {
        if (sender_.blocked()) return;
        sender_.pump(stream_, budget, [this](Frame frame) { on_sent(frame); });
        stream_.flush();
    }

    void start(Job job) {
        waiting_.push_back(std::move(job));
        admit();
    }

    // Ends the job as timed out unless it has ended; its memory is no longer touched.
    void give_up(std::uint64_t id) {
        const auto found = jobs_.find(id);
        if (found == jobs_.end()) return give_up_waiting(id);
        Job& job = found->second;
        const bool half_sent = sender_.reading_memory_for(job.kind, id);
        const Outcome end = end_of(job, {Ending::timeout, half_sent ? lost : good, job.payload->done(), ""});
        if (job.payload->on_device()) detach(*job.payload);  // before its end is told
        job.ticket->finish(end);
        if (half_sent) break_lane("a WRITE was given up half way");
        if (sender_.withdraw(job.kind, id)) return forget(found);
        detach(*job.payload);  // so its answer is dropped
    }

    void serve(Reply reply) {
        Request* request = asked(Kind::read, reply.id);
        if (request == nullptr) return;
        request->answered = true;
        request->payload_bytes = reply.payload->total();
        Frame frame{Kind::data, reply.id, encode_header({Kind::data, reply.id, 0, reply.payload->total()})};
        frame.payload = std::move(reply.payload);
        frame.guards = std::move(reply.guards);
        frame.tag = reply.tag;
        sender_.push(std::move(frame));
    }

    void accept(Reply reply) {
        Request* request = asked(Kind::write, reply.id);
        if (request == nullptr) return;
        request->answered = true;
        const bool fits = request->payload_bytes == reply.payload->total();
        if (!fits || !reply.guards.current()) {
            push_status(reply.id, fits ? changed : misfit);
            return drop_payload(request->payload_bytes);
        }
        receive_payload(reply.payload, false);
        accepted_ = Accepted{std::move(reply), good};
        enter_next_stages();  // a payload of 0 bytes is complete
    }

    void refuse(std::uint64_t id, std::uint32_t code, const std::string& why) {
        Request* request = asked(id);
        if (request == nullptr) return;
        request->answered = true;
        push_result(id, code, why);
        if (request->kind == Kind::write) drop_payload(request->payload_bytes);
    }

    void quiesce(std::int64_t tag) {
        if (replies_) replies_->drop(tag);
        sender_.quiesce(tag);
        if (!accepted_ || accepted_->reply.tag != tag) return;
        detach(*accepted_->reply.payload);
        accepted_->status = torn;
    }

    void lose(const std::string& why) {
        sender_.clear();
        accepted_.reset();
        for (auto& [id, job] : jobs_) {
            job.payload->detach();  // before its end is told
            job.ticket->finish(end_of(job, {Ending::lost, 0, job.payload->done(), why}));
        }
        for (Job& job : waiting_) job.ticket->finish({Ending::lost, 0, 0, why});
        jobs_.clear();
        waiting_.clear();
        requests_.clear();
    }

private:
    struct Request {
        Kind kind;
        std::uint64_t meta_bytes;
        std::uint64_t payload_bytes;  // of a READ, once it is served
        bool answered = false;
    };

    // WRITE whose payload is being received.
    struct Accepted {
        Reply reply;
        Status status;
    };

    using Jobs = std::unordered_map<std::uint64_t, Job>;

    // The stream's end and errors wake the thread at any mark.
    void set_low_water() {
        const auto wanted = static_cast<int>(stream_.to_come(receiver_.low_water()));
        if (wanted == low_water_) return;
        low_water_ = wanted;
        ::setsockopt(fd(), SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);
    }

    void enter_next_stages() {
        while (receiver_.complete()) enter_next_stage();
    }

    void enter_next_stage() {
        switch (receiver_.stage()) {
            case Receiver::Stage::header: return on_header();
            case Receiver::Stage::meta: return on_meta();
            case Receiver::Stage::payload: return on_payload();
            case Receiver::Stage::trailer: return on_trailer();
            case Receiver::Stage::paused: return;
        }
    }

    void on_header() {
        incoming_ = check_header(receiver_.header());
        switch (incoming_.kind) {
            case Kind::read:
            case Kind::write: note_request(); return receiver_.expect_meta(incoming_.meta_bytes);
            case Kind::result: sent_job(); return receiver_.expect_meta(incoming_.meta_bytes);
            case Kind::data: return begin_data();
        }
    }

    void begin_data() {
        Job& job = sent_job();
        if (job.kind != Kind::read) break_lane("DATA answers a WRITE, id ", incoming_.id);
        if (job.payload->total() != incoming_.payload_bytes)
            break_lane("DATA of ", incoming_.payload_bytes, " bytes answers a READ of ", job.payload->total());
        receive_payload(job.payload, true);
    }

    void on_meta() {
        std::string meta = std::move(receiver_.meta());
        if (incoming_.kind == Kind::result) {
            receiver_.expect_header();
            return on_result(load<std::uint32_t>(meta.data()), meta.substr(code_bytes));
        }
        const bool write = incoming_.kind == Kind::write;
        if (write)
            receiver_.pause();
        else
            receiver_.expect_header();
        if (auto reply = cached_reply(write, meta)) return write ? accept(std::move(*reply)) : serve(std::move(*reply));
        events_.push({write ? Event::What::write : Event::What::read, number_, incoming_.id, std::move(meta),
                      incoming_.payload_bytes});
    }

    // Nothing if Python must answer.
    std::optional<Reply> cached_reply(bool write, const std::string& meta) const {
        if (!replies_) return std::nullopt;
        try {
            const LaneRequest request = LaneRequest::parse(meta);
            const auto memory = replies_->find(write, request.handle);
            auto payload = memory ? memory->payload(request) : nullptr;
            if (!payload) return std::nullopt;
            return Reply{incoming_.id, std::move(payload), memory->guards, memory->tag};
        } catch (const RuleError&) {
            return std::nullopt;
        }
    }

    void on_payload() {
        if (incoming_.kind == Kind::data) return receiver_.expect_trailer();
        if (accepted_) {
            Accepted accepted = std::move(*accepted_);
            accepted_.reset();
            if (accepted.status == good && !accepted.reply.guards.current()) accepted.status = torn;
            const std::string& failure = accepted.reply.payload->failure();
            if (replies_ && accepted.status == good && failure.empty())
                replies_->count(true, accepted.reply.payload->total());
            failure.empty() ? push_status(accepted.reply.id, accepted.status)
                            : push_result(accepted.reply.id, torn, failure);
        }
        receiver_.expect_header();
    }

    void on_trailer() {
        const auto found = jobs_.find(incoming_.id);
        const std::uint64_t trailer = receiver_.trailer();
        receiver_.expect_header();
        if (found == jobs_.end()) break_lane("the job of a DATA frame is gone");
        if (trailer > UINT32_MAX) break_lane("DATA ends with the status ", trailer);
        Job& job = found->second;
        const Ending ending = trailer == good ? Ending::good : Ending::trailer;
        job.ticket->finish(
            end_of(job, {ending, static_cast<std::uint32_t>(trailer), job.payload->done(), trailer_text(trailer)}));
        forget(found);
    }

    static const char* trailer_text(std::uint64_t trailer) {
        const bool known = trailer <= aborted || trailer == failed;
        return known ? text_of(static_cast<Status>(trailer)) : "an unknown status";
    }

    // The end of a job, unless the device of its memory has failed.
    static Outcome end_of(const Job& job, Outcome otherwise) {
        if (job.payload->failure().empty()) return otherwise;
        return {Ending::device, 0, job.payload->done(), job.payload->failure()};
    }

    void on_result(std::uint32_t code, std::string why) {
        const auto found = jobs_.find(incoming_.id);
        if (found == jobs_.end()) break_lane("the job of a RESULT frame is gone");
        Job& job = found->second;
        const bool whole = job.kind == Kind::write && job.sent;
        if (code == good && !whole) break_lane("RESULT says that a job is done whose bytes have not moved");
        if (!job.sent) job.payload->detach();  // zeros complete the frame; the peer drops them
        const std::uint64_t bytes = code == good ? job.payload->total() : 0;
        job.ticket->finish({code == good ? Ending::good : Ending::refused, code, bytes, std::move(why)});
        forget(found);
    }

    void receive_payload(std::shared_ptr<Payload> payload, bool trailer) {
        drain_until_ = monotonic_ns() + max_drain_ns_;
        receiver_.expect_payload(std::move(payload), trailer);
    }

    void detach(Payload& payload) {
        payload.detach();
        if (receiver_.discarding()) drain_until_ = monotonic_ns() + max_drain_ns_;
    }

    bool window_open(const Job& job) const {
        return jobs_.size() < window_jobs && job.meta.size() <= window_meta_bytes - our_meta_bytes_;
    }

    void admit() {
        while (!waiting_.empty() && window_open(waiting_.front())) {
            Job job = std::move(waiting_.front());
            waiting_.pop_front();
            our_meta_bytes_ += job.meta.size();
            const bool write = job.kind == Kind::write;
            Frame frame{job.kind, job.id, encode_request(job.kind, job.id, job.meta, write ? job.payload->total() : 0)};
            if (write) frame.payload = job.payload;
            jobs_.emplace(job.id, std::move(job));
            sender_.push(std::move(frame));
        }
    }

    void give_up_waiting(std::uint64_t id) {
        for (auto job = waiting_.begin(); job != waiting_.end(); ++job)
            if (job->id == id) {
                job->ticket->finish({Ending::timeout, 0, 0, ""});
                waiting_.erase(job);
                return;
            }
    }

    void forget(Jobs::iterator job) {
        our_meta_bytes_ -= job->second.meta.size();
        jobs_.erase(job);
        admit();
    }

    Job& sent_job() {
        const auto found = jobs_.find(incoming_.id);
        if (found == jobs_.end()) break_lane("an answer to the unknown id ", incoming_.id);
        Job& job = found->second;
        const bool begun = job.sent || sender_.has_begun(job.kind, job.id);
        if (!begun || (job.kind == Kind::read && !job.sent))
            break_lane("an answer to id ", incoming_.id, ", which was not asked yet");
        return job;
    }

    void note_request() {
        if (requests_.size() >= window_jobs || incoming_.meta_bytes > window_meta_bytes - their_meta_bytes_)
            break_lane("the peer has more than ", window_jobs, " requests or ", window_meta_bytes,
                       " bytes of them unanswered");
        const Request request{incoming_.kind, incoming_.meta_bytes, incoming_.payload_bytes};
        if (!requests_.emplace(incoming_.id, request).second)
            break_lane("the id ", incoming_.id, " is of an unanswered request");
        their_meta_bytes_ += incoming_.meta_bytes;
    }

    // Request without an answer. If it is a WRITE, the lane is paused for it.
    Request* asked(std::uint64_t id) {
        const auto found = requests_.find(id);
        if (found == requests_.end() || found->second.answered) return nullptr;
        if (found->second.kind == Kind::write && !receiver_.paused()) return nullptr;
        return &found->second;
    }

    Request* asked(Kind kind, std::uint64_t id) {
        Request* request = asked(id);
        return request != nullptr && request->kind == kind ? request : nullptr;
    }

    void drop_payload(std::uint64_t bytes) {
        receive_payload(std::make_shared<Payload>(Payload::discarding(bytes)), false);
        enter_next_stages();
    }

    void push_status(std::uint64_t id, Status status) { push_result(id, status, text_of(status)); }

    void push_result(std::uint64_t id, std::uint32_t code, const std::string& why) {
        sender_.push({Kind::result, id, encode_result(id, code, why)});
    }

    void on_sent(const Frame& frame) {
        if (frame.requests()) {
            const auto found = jobs_.find(frame.id);
            if (found != jobs_.end() && found->second.kind == frame.kind) found->second.sent = true;
            return;
        }
        const auto found = requests_.find(frame.id);
        if (found == requests_.end()) return;
        if (replies_ && frame.kind == Kind::data && frame.status == good)
            replies_->count(false, found->second.payload_bytes);
        their_meta_bytes_ -= found->second.meta_bytes;
        requests_.erase(found);
    }

    std::uint64_t number_;
    Stream stream_;
    EventQueue& events_;
    Scrap scrap_;
    std::int64_t max_drain_ns_;
    std::shared_ptr<ReplyCache> replies_;
    Sender sender_;
    Receiver receiver_;
    int low_water_ = 1;
    Header incoming_;
    std::optional<Accepted> accepted_;
    std::int64_t drain_until_ = 0;
    Jobs jobs_;
    std::deque<Job> waiting_;
    std::uint64_t our_meta_bytes_ = 0;
    std::unordered_map<std::uint64_t, Request> requests_;
    std::uint64_t their_meta_bytes_ = 0;
};

}  // namespace datadist
