// Health checks of Argo CD in Lua, for the programs beside it.
module specdecode.io/devcluster/tools/lua

go 1.24.0

require github.com/yuin/gopher-lua v1.1.2
