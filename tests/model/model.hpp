// What the models share: steps that can be left out, and the run over the schedules (docs/notes/memory-order.md).
//
// A comment with a name, a file and a quotation says which step of the source the line below it stands for. check.py
// compares these quotations with the source.
#pragma once

#include <cstddef>
#include <cstdio>
#include <ostream>
#include <string>

#include <relacy/relacy.hpp>

static int left_out = 0;  // the number of the step that this run leaves out; 0: none

inline bool kept(int step) { return left_out != step; }

// The order of an operation: relaxed where step `step` is left out.
inline rl::memory_order kept(int step, rl::memory_order order) { return kept(step) ? order : rl::mo_relaxed; }

// Without `preemptions` random schedules; else every schedule in which a thread is interrupted at most so often.
template <typename Model>
rl::test_params simulated(int step, unsigned preemptions = 0) {
    std::ostream nowhere(nullptr);
    rl::test_params params;
    params.iteration_count = 300000;
    params.search_type = preemptions == 0 ? rl::random_scheduler_type : rl::fair_context_bound_scheduler_type;
    params.context_bound = preemptions;
    params.output_stream = params.progress_stream = &nowhere;
    left_out = step;
    rl::simulate<Model>(params);
    return params;
}

inline bool faultless(const rl::test_params& params) { return params.test_result == rl::test_result_success; }

// The whole model must pass, in random schedules and in every one of at most `preemptions`. Without step n, which
// steps[n - 1] names, a random schedule must fail. Prints a line for each case; returns the exit status of the program.
template <typename Model, std::size_t count>
int check_model(const std::string& name, const char* const (&steps)[count], unsigned preemptions) {
    int unexpected = 0;
    const auto tell = [&](const std::string& what, const rl::test_params& params, const char* kind, bool expected) {
        const char* result = faultless(params) ? "no fault" : rl::test_result_str(params.test_result);
        std::printf("%s %s: %s, %llu %s%s\n", name.c_str(), what.c_str(), result,
                    static_cast<unsigned long long>(params.stop_iteration), kind, expected ? "" : ": NOT EXPECTED");
        unexpected += !expected;
    };
    const rl::test_params some = simulated<Model>(0), every = simulated<Model>(0, preemptions);
    tell("as it is", some, "random schedules", faultless(some));
    tell("as it is", every, ("schedules, all of at most " + std::to_string(preemptions) + " preemptions").c_str(),
         faultless(every));
    for (std::size_t step = 1; step <= count; ++step) {
        const rl::test_params weak = simulated<Model>(static_cast<int>(step));
        tell("without " + std::string(steps[step - 1]), weak, "random schedules", !faultless(weak));
    }
    return unexpected == 0 ? 0 : 1;
}
