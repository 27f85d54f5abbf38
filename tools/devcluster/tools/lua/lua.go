// Package lua runs a health check of Argo CD: its interpreter, with fewer libraries than there.
package lua

import (
	"fmt"

	"github.com/yuin/gopher-lua"
)

// Health is what a check returns.
type Health struct {
	Status  string `json:"status"`
	Message string `json:"message"`
}

// Judge runs a check. The object is its global `obj`.
func Judge(script string, object map[string]any) (*Health, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	libraries := []struct {
		name string
		open lua.LGFunction
	}{
		{lua.LoadLibName, lua.OpenPackage},
		{lua.BaseLibName, lua.OpenBase},
		{lua.TabLibName, lua.OpenTable},
	}
	for _, library := range libraries {
		call := lua.P{Fn: state.NewFunction(library.open), NRet: 0, Protect: true}
		if err := state.CallByParam(call, lua.LString(library.name)); err != nil {
			return nil, err
		}
	}
	state.SetGlobal("obj", luaValue(state, object))
	if err := state.DoString(script); err != nil {
		return nil, err
	}
	table, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		return nil, fmt.Errorf("the script returns %s, not a table", state.Get(-1).Type())
	}
	return &Health{lua.LVAsString(table.RawGetString("status")), lua.LVAsString(table.RawGetString("message"))}, nil
}

func luaValue(state *lua.LState, value any) lua.LValue {
	switch each := value.(type) {
	case bool:
		return lua.LBool(each)
	case string:
		return lua.LString(each)
	case int64:
		return lua.LNumber(each)
	case float64:
		return lua.LNumber(each)
	case []any:
		table := state.NewTable()
		for _, item := range each {
			table.Append(luaValue(state, item))
		}
		return table
	case map[string]any:
		table := state.NewTable()
		for key, item := range each {
			table.RawSetString(key, luaValue(state, item))
		}
		return table
	}
	return lua.LNil
}
