"""The engine's deciding code: sequences, blocks, scheduler and steps. No PyTorch, no gRPC, no asyncio."""
